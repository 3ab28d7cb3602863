"""Lesson 10. Suite `many`: 256 requests at once, of 100 to 1,024 tokens in and out, and how near decode is to memory.

It is the load of nano-vllm's own bench (bench.py there: 256 sequences, both lengths uniform from 100 to 1,024, end
tokens ignored), made for a GPU. A decode step has to read all weights, and K and V of every running request: those
bytes over the step's time, as a share of the rate at which this run read memory, say how far a step is from its limit.
"""

import random
import statistics
from argparse import Namespace
from typing import Any

from scripts.bench.common import Report
from scripts.bench.options import add_checkpoint, checkpoint_of
from scripts.bench.peers import weight_bytes
from scripts.bench.runs import Jobs, Step, Watch, ours, watch
from scripts.bench.serve import blocks_of
from scripts.smoke.arguments import pick_device

from mini_engine.assembly.build import build_engine
from mini_engine.assembly.loading import load
from mini_engine.checkpoint.config import DTYPES
from mini_engine.engine.scheduler_config import SchedulerConfig

REQUESTS, SHORTEST, LONGEST = 256, 100, 1024
FULL = 0.9  # a step counts as full while at least this share of the requests decodes in it


def add_arguments(parser) -> None:
    """Add this suite's options."""
    add_checkpoint(parser)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


def jobs_of(vocab_size: int, quick: bool) -> Jobs:
    """Return the load; with --quick a sixteenth of the requests, of a tenth of the length."""
    chance, count, part = random.Random(0), REQUESTS // (16 if quick else 1), 10 if quick else 1

    def length() -> int:
        return chance.randint(SHORTEST // part, LONGEST // part)

    return [([chance.randrange(vocab_size) for _ in range(length())], length()) for _ in range(count)]


def figures(engine, jobs: Jobs, fixed: int, per_token: int, read: float) -> dict[str, Any]:
    """Run the jobs once. Return tokens/s, and the time and the share of `read` of steps in which nearly all decode.

    Args:
        fixed: bytes that every step reads. per_token: bytes of K and V. read: bytes/s.
    """
    with ours(engine)() as run:
        watched, before, full = Watch(jobs), 0.0, []
        for step in run(jobs):
            took, before = step.when - (before or watched.begun), step.when
            watched.note(step)
            if is_full(step, len(jobs)):
                held = sum(len(ids) + len(step.tokens[job]) for job, (ids, _) in enumerate(jobs) if job in step.tokens)
                full.append((took, (fixed + held * per_token) / took / read))
    seconds = watched.figures()["seconds"]
    found = {"tokens/s": sum(wanted for _, wanted in jobs) / seconds, "seconds": seconds, "full steps": len(full)}
    times, shares = zip(*full, strict=True) if full else ([0.0], [0.0])
    return found | {"ms": 1e3 * statistics.median(times), "% of memory": 100 * statistics.median(shares)}


def is_full(step: Step, count: int) -> bool:
    """Return True if a step only decodes, and for nearly all of the requests."""
    return not step.prefill_tokens and len(step.tokens) >= FULL * count


def run(args: Namespace) -> Report:
    """Measure the load with captured and with eager steps, as far as the device supports them."""
    device, rows = pick_device(args.device), []
    path = checkpoint_of(args)
    fixed = weight_bytes(path, DTYPES[args.dtype].itemsize)
    ways: dict[str, dict[str, bool]] = {"captured steps": {}, "eager steps": {"cuda_graphs": False}}
    for name, options in ways.items() if device == "cuda" else [("steps", {})]:
        model = load(str(path), args.dtype, device)
        jobs = jobs_of(model.config.vocab_size, args.quick)
        per_token = model.config.kv_bytes_per_token(DTYPES[args.dtype])
        engine = engine_for(model, jobs, **options)
        watch(ours(engine), [[(ids, 4) for ids, _ in jobs[:4]]])  # compiles the kernels for prompts
        rows.append({"ours": name} | figures(engine, jobs, fixed, per_token, args.rates.read))
        engine.runner.close()
    total = sum(len(ids) for ids, _ in jobs), sum(wanted for _, wanted in jobs)
    note = f"{path.name}, {args.dtype}, {device}: {len(jobs)} requests, {total[0]:,} tokens in and {total[1]:,} out"
    return Report("many", rows, [note])


def engine_for(model: Any, jobs: Jobs, **options: Any) -> Any:
    """Return an engine whose pool holds all jobs at their ends, and which runs them all at once."""
    limits = SchedulerConfig(max_num_seqs=len(jobs), max_num_batched_tokens=16_384, chunked_prefill_size=4096)
    num_blocks = 1 + sum(blocks_of(jobs))  # the null block
    return build_engine(model, num_blocks=num_blocks, scheduler_config=limits, enable_prefix_caching=False, **options)
