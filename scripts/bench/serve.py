"""Lesson 5. Suite `serve`: requests of mixed lengths, ours against transformers' padded batch and continuous batching.

All contenders run the same weights in the same process, in interleaved rounds. Only requested tokens count: a padded
batch runs until its longest answer is done. End tokens are ignored, so that all do the same work.
"""

import random
from argparse import Namespace

from scripts.bench.common import Report, left_out
from scripts.bench.options import add_dtype, add_model, model_of
from scripts.bench.runs import Jobs, Watch, Way, continuous, load_hf, ours, padded, watch
from scripts.bench.turns import Timing, take_turns
from scripts.smoke.arguments import pick_device

from mini_engine.checkpoint.config import DTYPES
from mini_engine.engine.engine import Engine
from mini_engine.families.qwen3 import load_model

REQUESTS = 32
OURS = "ours"


def add_arguments(parser) -> None:
    """Add this suite's options."""
    add_model(parser)
    add_dtype(parser, "float32")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


def jobs_of(vocab_size: int, quick: bool) -> Jobs:
    """Return the load: prompts of 4 to 256 tokens, answers of 4 to 96, mostly short."""
    chance, scale = random.Random(0), 2 if quick else 1

    def length(most: int) -> int:
        return max(4, int(most * chance.random() ** 2 / scale))

    return [([chance.randrange(vocab_size) for _ in range(length(256))], length(96)) for _ in range(REQUESTS)]


def blocks_of(jobs: Jobs) -> list[int]:
    """Return the blocks of 16 tokens that each job needs."""
    return [-(-(len(ids) + wanted) // 16) for ids, wanted in jobs]


def transformers_ways(args: Namespace, jobs: Jobs, num_blocks: int) -> dict[str, Way]:
    """Return transformers' two ways, the second one if it runs here. Each has its own model, as one modifies it."""

    def hf():
        return load_hf(model_of(args), args.dtype, pick_device(args.device))

    ways = {"transformers generate, padded": padded(hf())}
    name, way = "transformers generate_batch", continuous(hf(), num_blocks)
    try:
        watch(way, [jobs[:2]])
        ways[name] = way
    except Exception as error:  # it may lack anything here
        left_out(name, f"it cannot run here ({str(error).splitlines()[0]})")
    return ways


def run(args: Namespace) -> Report:
    """Measure seconds and tokens/s of each contender, and its time relative to ours."""
    model = load_model(model_of(args), DTYPES[args.dtype], pick_device(args.device))
    jobs = jobs_of(model.config.vocab_size, args.quick)
    needs = blocks_of(jobs)
    shares = {OURS: sum(needs), "ours, a quarter of the blocks": max(max(needs), sum(needs) // 4)}
    ways = {name: ours(Engine.for_model(model, num_blocks=blocks + 1)) for name, blocks in shares.items()}
    ways |= transformers_ways(args, jobs, 0)
    timings, passes = in_turns(ways, [jobs], args.rounds or (1 if args.quick else 5), "serve")
    total = sum(wanted for _, wanted in jobs)
    rows = [
        {
            "contender": name,
            "seconds": timing.median,
            "new tokens/s": total / timing.median,
            "times ours": timing.median / timings[OURS].median,
            "answers as ours": as_ours(passes, name),
            "± %": timing.spread * 100,
        }
        for name, timing in timings.items()
    ]
    prompts = sum(len(prompt) for prompt, _ in jobs)
    note = f"{len(jobs)} requests, {prompts} prompt tokens, {total} new tokens, {args.dtype} on {model.device}"
    return Report("serve", rows, [note])


def in_turns(
    ways: dict[str, Way], waves: list[Jobs], rounds: int, title: str
) -> tuple[dict[str, Timing], dict[str, list[list[Watch]]]]:
    """Run waves of jobs in every way, in turns. Return the times, and each run's Watches, the warm-up first."""
    passes: dict[str, list[list[Watch]]] = {name: [] for name in ways}
    contenders = {name: lambda name=name: passes[name].append(watch(ways[name], waves)) for name in ways}
    return take_turns(contenders, rounds, title), passes


def as_ours(passes: dict[str, list[list[Watch]]], name: str) -> str:
    """Say how many answers equal those of the first way."""
    first, own = ([ids for seen in passes[key][-1] for ids in seen.answers] for key in (next(iter(passes)), name))
    return f"{sum(a == b for a, b in zip(first, own, strict=True))}/{len(first)}"
