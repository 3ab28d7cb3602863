"""Lesson 8. Suite `prefix`: shared prefixes and chats, with and without prefix sharing, and two modes of transformers.

All contenders run the same weights in the same process, in interleaved rounds, each from an empty cache. A chat's turns
are fixed in advance, so that all contenders run the same prompts, and end tokens are ignored, so that all do the same
work.
"""

import logging
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

from scripts.bench.common import Report, take_turns
from scripts.bench.serve import add_arguments as add_model_arguments
from scripts.bench.serve import both_models, equal, tuned_config

import torch

from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.errors import UserError
from mini_engine.kv.manager import KvCacheManager
from mini_engine.kv.prefix_cache import PrefixCache, caching_manager
from mini_engine.kv.radix import RadixTree

NEW_TOKENS = 16
SHARING, PLAIN = "ours, sharing", "ours, not sharing"
SHARED, CHATS, STRANGERS = LOADS = ("shared beginning", "chats", "nothing shared")


def add_arguments(parser) -> None:
    """Add the options of suite `serve`, whose number of requests the loads here ignore, and a choice of loads."""
    add_model_arguments(parser)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=LOADS, help="default: all of them")


@dataclass
class Pass:
    """One contender's run of a load. first_tokens: seconds from a prompt's arrival to its first token."""

    answers: list[list[int]] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    prefill_tokens: int = 0


Waves = list[list[list[int]]]  # prompts that arrive together; the next wave arrives once all are answered


def shared_beginning(vocab_size: int, quick: bool) -> Waves:
    """Return 16 requests with a shared prefix of 512 tokens and 16 tokens of their own."""
    chance, requests, common = random.Random(0), 8 if quick else 16, 128 if quick else 512
    start = chance.choices(range(vocab_size), k=common)
    return [[start + chance.choices(range(vocab_size), k=16) for _ in range(requests)]]


def chats(model, quick: bool) -> Waves:
    """Return chats of eight users and eight turns; each prompt is the chat so far and 24 new tokens."""
    chance, users, turns = random.Random(1), *((3, 3) if quick else (8, 8))
    run, waves, histories = ours(model, KvCacheManager, users * turns * 4), [], [[] for _ in range(users)]
    for _ in range(turns):
        histories = [h + chance.choices(range(model.config.vocab_size), k=24) for h in histories]
        waves.append(histories)
        histories = [h + answer for h, answer in zip(histories, run([histories]).answers, strict=True)]
    return waves


def strangers(vocab_size: int, quick: bool) -> Waves:
    """Return prompts of 64 to 256 tokens without common prefixes, to measure the cost of looking for them."""
    chance = random.Random(2)
    return [[chance.choices(range(vocab_size), k=chance.randrange(64, 257)) for _ in range(6 if quick else 24)]]


# ---------------------------------------------------------------- contenders


def ours(model, manager, num_blocks: int):
    """Return a run of our engine with that manager, starting from an empty cache."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    engine = Engine.for_model(model, num_blocks=num_blocks + 1, manager=manager)
    tables = engine.scheduler.manager

    def run(waves: Waves) -> Pass:
        if isinstance(tables.prefixes, PrefixCache):
            tables.prefixes.clear()
        done = Pass()
        for prompts in waves:
            begun = time.perf_counter()
            requests = [engine.add_request(str(index), ids, params) for index, ids in enumerate(prompts)]
            seen = set()
            while engine.has_unfinished:
                result = engine.step()
                done.prefill_tokens += result.stats.prefill_tokens
                first = set(result.new_tokens) - seen
                done.first_tokens += [time.perf_counter() - begun] * len(first)
                seen |= first
            done.answers += [request.output_ids for request in requests]
        return done

    return run


def padded(hf_model):
    """Return a run of transformers' `generate`: a batch per wave, padded on the left."""

    def run(waves: Waves) -> Pass:
        done = Pass()
        for prompts in waves:
            width, times = max(map(len, prompts)), []
            ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=hf_model.device)
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=ids.device)
            begun = time.perf_counter()

            def note(input_ids, scores, times=times, begun=begun):  # called with each step's logits
                times.append(time.perf_counter() - begun)
                return scores

            with torch.inference_mode():
                out = hf_model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, logits_processor=[note])
            done.answers += [row[width:].tolist() for row in out]
            done.first_tokens += times[:1] * len(prompts)
            done.prefill_tokens += ids.numel()
        return done

    return run


def continuous(hf_model, num_blocks: int):
    """Return a run of the continuous batching behind `generate_batch`, which finds equal blocks by their hashes.

    It does not report how many tokens it computed.
    """
    from transformers import GenerationConfig

    config = tuned_config(num_blocks)
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=NEW_TOKENS)

    def run(waves: Waves) -> Pass:
        done = Pass()
        with hf_model.continuous_batching_context_manager(greedy, continuous_batching_config=config) as manager:
            for prompts in waves:
                begun, firsts, answers = time.perf_counter(), {}, {}
                names = [
                    manager.add_request(p, max_new_tokens=NEW_TOKENS, eos_token_id=-1, streaming=True) for p in prompts
                ]
                while len(answers) < len(prompts):
                    result = manager.get_result(timeout=1)
                    if result is None and not manager.is_running():
                        raise UserError("its thread ended before all answers were complete")
                    if result is not None and result.generated_tokens:
                        firsts.setdefault(result.request_id, time.perf_counter() - begun)
                        if result.is_finished():
                            answers[result.request_id] = result.generated_tokens
                done.answers += [list(answers[name]) for name in names]
                done.first_tokens += firsts.values()
        return done

    return run


def contenders(model, load_hf, waves: Waves, alone: bool) -> dict:
    """Return the contenders of a load. Each of the two from transformers needs its own model, because one modifies it.

    alone: only ours with and without sharing.
    """
    blocks = sum(-(-(len(ids) + NEW_TOKENS) // 16) for wave in waves for ids in wave)
    ready = {
        SHARING: ours(model, caching_manager, blocks),
        PLAIN: ours(model, KvCacheManager, blocks),
    }
    if alone:
        return ready
    ready["transformers generate, padded"] = padded(load_hf())
    try:
        ready["transformers generate_batch"] = continuous(load_hf(), blocks // 2)
        ready["transformers generate_batch"]([waves[0][:2]])
    except Exception as error:  # optional: any of its requirements may be missing
        ready.pop("transformers generate_batch", None)
        sys.stderr.write(f"left out: transformers generate_batch; it cannot run here ({str(error).splitlines()[0]})\n")
    return ready


# ---------------------------------------------------------------- the report


def measure(load: str, ready: dict, waves: Waves, rounds: int) -> list[dict]:
    """Measure one load with all contenders in interleaved rounds. Return a row per contender."""
    passes = {name: [] for name in ready}
    timings = take_turns({name: lambda n=name: passes[n].append(ready[n](waves)) for name in ready}, rounds, load)
    pairs = zip(timings[SHARING].seconds, timings[PLAIN].seconds, strict=True)
    gain = median(plain / sharing for sharing, plain in pairs)
    first = {name: median(mean(each.first_tokens) for each in done[1:]) for name, done in passes.items()}
    return [
        {
            "load": load,
            "contender": name,
            "seconds": timing.median,
            "times ours": gain if name == PLAIN else timing.median / timings[SHARING].median,
            "to first token, s": first[name],
            "times ours ": first[name] / first[SHARING],
            "prefill tokens": passes[name][-1].prefill_tokens or None,
            "± %": timing.spread * 100,
            "answers as ours": f"{equal(passes[name][-1].answers, passes[SHARING][-1].answers)}/{sum(map(len, waves))}",
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


def run(args) -> Report:
    """Measure three loads: seconds, time to first token, prefill tokens, and each contender's time relative to ours."""
    from scripts.smoke.arguments import pick_device

    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    rounds = args.rounds or (2 if args.quick else 5)
    with tempfile.TemporaryDirectory(prefix="bench-prefix-") as folder:
        model, load_hf = both_models(args, Path(folder), pick_device(args.device))
        vocab_size = model.config.vocab_size
        loads = {
            SHARED: lambda: shared_beginning(vocab_size, args.quick),
            CHATS: lambda: chats(model, args.quick),
            STRANGERS: lambda: strangers(vocab_size, args.quick),
        }
        rows = []
        for name in args.loads:
            waves, alone = loads[name](), name == STRANGERS
            rows += measure(name, contenders(model, load_hf, waves, alone), waves, rounds * (8 if alone else 1))
    return Report("prefix", rows, match_times(args.quick), drawn="seconds")
