"""Course machinery. For `step --shared`: where the time of `peers`' load with a shared beginning goes.

The engine answers the load, and lesson 9's C++ times its parts in each step, per thread; the rest are the vocabulary
head, the sampler, the scheduler and Python. The first step computes one prompt while the others wait for its beginning;
the second computes their own tokens; then all decode.
"""

import time
from typing import Any, NamedTuple

from scripts.bench.common import Report
from scripts.bench.options import checkpoint_of
from scripts.bench.peer_worker import our_engine
from scripts.bench.peers import loads_of
from scripts.bench.prefill_parts import check_timed
from scripts.bench.runs import Jobs
from scripts.bench.turns import Timing

from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.layers import native

KINDS = ("one prompt, the others wait", "the other prompts' own tokens", "decode")


class Part(NamedTuple):
    """One kind of step in one run of the load: the number of steps, prompt tokens, seconds in total and by part."""

    steps: int
    tokens: int
    seconds: float
    parts: dict[str, float]


def run_once(engine: Engine, jobs: Jobs) -> dict[str, Part]:
    """Answer the load from an empty tree, and sum up its steps by kind."""
    engine.scheduler.manager.coordinator.clear()
    for i, (ids, wanted) in enumerate(jobs):
        engine.add_request(str(i), ids, SamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True))
    found: dict[str, Part] = {}
    while engine.has_unfinished:
        with engine.runner.model.model.timed() as seconds:
            begun = time.perf_counter()
            prompt_tokens = engine.step().stats.prefill_tokens
            took = time.perf_counter() - begun
        kind = KINDS[2] if not prompt_tokens else KINDS[1] if found else KINDS[0]
        parts = dict(zip(native.PARTS, seconds.mean(0).tolist(), strict=True))
        before = found.get(kind, Part(0, 0, 0.0, dict.fromkeys(parts, 0.0)))
        sums = {name: before.parts[name] + parts[name] for name in parts}
        found[kind] = Part(before.steps + 1, before.tokens + prompt_tokens, before.seconds + took, sums)
    return found


def rows_of(runs: list[dict[str, Part]]) -> list[dict[str, Any]]:
    """Return a row for each kind of step, of medians over the runs, and one for the whole load."""
    whole = Timing([sum(part.seconds for part in run.values()) for run in runs])
    rows = []
    for kind in runs[0]:
        timing = Timing([run[kind].seconds for run in runs])
        parts = {name: Timing([run[kind].parts[name] for run in runs]).median for name in runs[0][kind].parts}
        head = runs[0][kind]
        rows.append(
            {"steps": kind, "count": head.steps, "prompt tokens": head.tokens, "ms": timing.median * 1e3}
            | {"± %": timing.spread * 100, "% of load": 100 * timing.median / whole.median}
            | {name: seconds * 1e3 for name, seconds in parts.items()}
            | {"the rest": max(0.0, timing.median - sum(parts.values())) * 1e3}
        )
    return rows


def measure(args) -> Report:
    """Answer the load in rounds, and report the time of its steps."""
    engine = our_engine({"model": checkpoint_of(args), "dtype": args.dtype, "pool_gib": 1})
    check_timed(engine.runner.model, "--shared")
    loads = loads_of(engine.runner.model.config.vocab_size, args.quick)
    ((name, jobs),) = [item for item in loads.items() if item[0].startswith("shared")]
    run_once(engine, jobs)
    runs = [run_once(engine, jobs) for _ in range(args.rounds or (2 if args.quick else 7))]
    tokens = sum(wanted for _, wanted in jobs)
    seconds = Timing([sum(part.seconds for part in run.values()) for run in runs])
    notes = [f"{checkpoint_of(args)}, {args.dtype}; {name}; {tokens / seconds.median:.1f} tokens/s"]
    return Report("step", rows_of(runs), notes)
