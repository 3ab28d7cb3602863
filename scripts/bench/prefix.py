"""Lesson 8. Suite `prefix`: shared prefixes and chats, with and without prefix sharing, and two modes of transformers.

All contenders run the same weights in the same process, in interleaved rounds, each from an empty cache. A chat's turns
are fixed in advance, so that all contenders run the same prompts, and end tokens are ignored, so that all do the same
work.
"""

import random
import time
from argparse import Namespace
from statistics import mean, median

from scripts.bench import serve
from scripts.bench.common import Report
from scripts.bench.options import add_choice, model_of
from scripts.bench.runs import PAGE, Jobs, ours, watch
from scripts.smoke.arguments import pick_device

from mini_engine.checkpoint.config import DTYPES
from mini_engine.engine.engine import Engine
from mini_engine.families.qwen3 import load_model
from mini_engine.kv.cache_coordinator import caching_manager
from mini_engine.kv.manager import KvCacheManager
from mini_engine.kv.radix import RadixTree

NEW_TOKENS = 16
SHARING, PLAIN = "ours, sharing", "ours, not sharing"
SHARED, CHATS, STRANGERS = LOADS = ("shared beginning", "chats", "nothing shared")
Waves = list[Jobs]  # the next wave arrives once all jobs of the previous one are answered


def add_arguments(parser) -> None:
    """Add the options of suite `serve`, and a choice of loads."""
    serve.add_arguments(parser)
    add_choice(parser, "loads", LOADS)


def waves_of(load: str, model, quick: bool) -> Waves:
    """Return a load by name."""
    if load == CHATS:
        return chats(model, quick)
    return [shared_beginning(model.config.vocab_size, quick) if load == SHARED else strangers(model.config, quick)]


def shared_beginning(vocab_size: int, quick: bool) -> Jobs:
    """Return 16 requests with a shared prefix of 512 tokens and 16 own tokens each."""
    chance, requests, common = random.Random(0), 8 if quick else 16, 128 if quick else 512
    start = chance.choices(range(vocab_size), k=common)
    return [(start + chance.choices(range(vocab_size), k=16), NEW_TOKENS) for _ in range(requests)]


def chats(model, quick: bool) -> Waves:
    """Return chats of eight users and eight turns; each prompt is the chat so far and 24 new tokens."""
    chance, users, turns = random.Random(1), *((3, 3) if quick else (8, 8))
    way = ours(Engine.for_model(model, num_blocks=users * turns * 4 + 1))
    waves, histories = [], [[] for _ in range(users)]
    for _ in range(turns):
        histories = [h + chance.choices(range(model.config.vocab_size), k=24) for h in histories]
        waves.append([(history, NEW_TOKENS) for history in histories])
        histories = [h + answer for h, answer in zip(histories, watch(way, waves[-1:])[0].answers, strict=True)]
    return waves


def strangers(config, quick: bool) -> Jobs:
    """Return prompts of 64 to 256 tokens without common prefixes, to measure the cost of looking for them."""
    chance, ids = random.Random(2), range(config.vocab_size)
    return [(chance.choices(ids, k=chance.randrange(64, 257)), NEW_TOKENS) for _ in range(6 if quick else 24)]


def measure(load: str, model, args: Namespace) -> list[dict]:
    """Measure one load with all contenders, where nothing is shared ours alone. Return a row per contender."""
    waves, rounds = waves_of(load, model, args.quick), args.rounds or (2 if args.quick else 5)
    blocks = sum(sum(serve.blocks_of(jobs)) for jobs in waves)
    managers = {SHARING: caching_manager, PLAIN: KvCacheManager}
    ways = {
        name: ours(Engine.for_model(model, num_blocks=blocks + 1, manager=manager))
        for name, manager in managers.items()
    }
    if load == STRANGERS:
        rounds *= 8
    else:
        ways |= serve.transformers_ways(args, waves[0], blocks * 16 // PAGE)
    timings, passes = serve.in_turns(ways, waves, rounds, load)
    pairs = zip(timings[SHARING].seconds, timings[PLAIN].seconds, strict=True)
    gain = median(plain / sharing for sharing, plain in pairs)
    first = {
        name: median(mean(seconds for seen in each for seconds in seen.first_tokens) for each in found[1:])
        for name, found in passes.items()
    }
    return [
        {
            "load": load,
            "contender": name,
            "seconds": timing.median,
            "times ours": gain if name == PLAIN else timing.median / timings[SHARING].median,
            "to first token, s": first[name],
            "times ours ": first[name] / first[SHARING],
            "prefill tokens": sum(seen.prefill_tokens for seen in passes[name][-1]) or None,
            "± %": timing.spread * 100,
            "answers as ours": serve.as_ours(passes, name),
        }
        for name, timing in timings.items()
    ]


def match_times(quick: bool) -> list[str]:
    """Measure finding and storing 4,096 tokens, with few and with many prefixes stored. Return a note each."""
    chance, lines = random.Random(0), []
    for stored in (1, 1000) if quick else (1, 1000, 10_000):
        tree, prompt = RadixTree(16), chance.choices(range(150_000), k=4096)
        for index in range(stored):
            other = prompt if index == 0 else chance.choices(range(150_000), k=64)
            tree.insert(other, list(range(len(other) // 16)))
        found, storing = [], []
        for index in range(200):
            begun = time.perf_counter()
            tree.match(prompt)
            found.append(time.perf_counter() - begun)
            new = [*prompt[:4080], *([index] * 16)]
            begun = time.perf_counter()
            tree.insert(new, list(range(256)))
            storing.append(time.perf_counter() - begun)
        lines.append(
            f"{stored} prefix{'es' * (stored > 1)} stored: {median(found) * 1e6:.0f} µs to find 4,096 tokens, "
            f"{median(storing) * 1e6:.0f} µs to store 16 more behind 4,080"
        )
    return lines


def run(args: Namespace) -> Report:
    """Measure three loads: seconds, time to first token, prefill tokens, and each contender's time relative to ours."""
    model = load_model(model_of(args), DTYPES[args.dtype], pick_device(args.device))
    rows = [row for load in args.loads for row in measure(load, model, args)]
    return Report("prefix", rows, match_times(args.quick))
