"""Course machinery. Measures the operations of a decode step, for lesson 9's second trace.

    python -m scripts.traces.operations      # needs a C++ compiler; then record the trace l9-operations again

torch's profiler reports when each operation begins and ends. It slows each of them a little, so the file also has the
step's time without it; both are from the fastest round. The list of operations does not depend on the machine: the
recorder (scripts/traces/gaps.py) counts them again.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from scripts import ROOT, first_line

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from mini_engine.attention.registry import load_kernel
from mini_engine.families.qwen3 import load_model
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.block_table import BlockTable
from mini_engine.kv.block_tensor import KvPool, PackedRequest, plan_packed, reserve_all
from mini_engine.layers.fast_model import speed_up
from mini_engine.pocket import POCKET_DIR

FIGURES = ROOT / "lessons" / "l9_speed" / "operations.json"
HISTORY, ROUNDS, RUNS = 64, 60, 3_000
BACKENDS = ("reference", "torch", "packed")
OURS = ("attention", "run_layers", "linear")  # calls that torch does not see; `named` makes them visible
# Operations without computation: views, allocations, casts to a tensor's own dtype
FREE = {
    *("view", "reshape", "split", "slice", "chunk", "unsqueeze", "expand", "transpose", "select", "flatten", "alias"),
    *("t", "detach", "narrow", "as_strided", "empty", "new_empty", "to", "resolve_conj", "resolve_neg"),
}
Step = Callable[[], Any]


def step_of(backend: str) -> Step:
    """Return a function that runs one decode step of the pocket model: one sequence, after HISTORY tokens."""
    model = load_model(POCKET_DIR)
    model = model if backend == "reference" else speed_up(model, backend)
    kernel = load_kernel("cpu" if backend == "packed" else "auto")
    pool = KvPool(model.config, 8, 16, kernel if backend == "packed" else named("attention", kernel))
    request = PackedRequest(list(range(HISTORY)), BlockTable(BlockAllocator(8, 16)), cur_len=HISTORY - 1)
    reserve_all([request])
    meta = plan_packed([request], 16, torch.device("cpu"))
    if backend == "packed":
        model: Any = model
        model.model.functions.run_layers = named("run_layers", model.model.functions.run_layers)
        model.lm_head.linear = named("linear", model.lm_head.linear)
    return partial(model, torch.tensor([HISTORY - 1]), pool, meta, torch.tensor([0]))


def named(name: str, function: Callable) -> Callable:
    """Return the function, visible to the profiler as an operation of this name."""

    def call(*arguments):
        with record_function(name):
            return function(*arguments)

    return call


def operations(step: Step) -> list[list[Any]]:
    """Run a step; return each operation as `[name, start, duration]` in µs, without views and nested operations."""
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    events: Any = profiler.events()
    found, end = [], 0.0
    for event in sorted(events, key=lambda event: event.time_range.start):
        name = event.name.removeprefix("aten::")
        is_one = event.name.startswith("aten::") or name in OURS
        if is_one and name not in FREE and event.time_range.start >= end:
            end = event.time_range.end
            found.append([name, event.time_range.start, end - event.time_range.start])
    begin = found[0][1]
    return [[name, round(start - begin, 1), round(took, 1)] for name, start, took in found]


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=first_line(__doc__)).parse_args(argv)
    torch.set_num_threads(1)
    figures = measured({backend: step_of(backend) for backend in BACKENDS})
    from scripts.bench.common import describe_machine

    about = describe_machine()
    report = {"command": "python -m scripts.traces.operations", "machine": about, "history": HISTORY, **figures}
    lines = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in report.items()]
    FIGURES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8", newline="\n")
    for backend, figure in figures.items():
        print(f"{backend}: {len(figure['operations'])} operations, {figure['us']:.0f} µs without the profiler")
    return 0


def measured(steps: dict[str, Step]) -> dict[str, Any]:
    """Return the operations of each backend's fastest step, and the time of one without the profiler, in µs."""
    best = dict.fromkeys(steps, float("inf"))
    rounds: dict[str, list[list[list[Any]]]] = {backend: [] for backend in steps}
    for _ in range(RUNS):
        best = {backend: min(best[backend], timed(step)) for backend, step in steps.items()}
    for _ in range(ROUNDS):
        for backend, step in steps.items():
            rounds[backend].append(operations(step))
    return {
        backend: {"us": round(best[backend] * 1e6, 1), "operations": min(rounds[backend], key=ends_at)}
        for backend in steps
    }


def ends_at(found: list[list[Any]]) -> float:
    return found[-1][1] + found[-1][2]


def timed(step: Step) -> float:
    with torch.inference_mode():
        start = time.perf_counter()
        step()
        return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
