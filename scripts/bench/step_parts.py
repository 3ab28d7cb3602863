"""Course machinery. For `step --prefill` and `--shared`: where the time of a load's steps goes.

The engine answers one of `peers`' loads from an empty cache, and lesson 9's C++ times its parts in each step, per
thread; between two parts a thread waits for the others. The rest is the vocabulary head, the sampler, the scheduler and
Python. With a shared beginning, the first step computes one prompt while the others wait for its beginning, and the
second computes their own tokens. The limit of a prefill's matrices is oneDNN with packed weights on matrices of the
same shapes, in the same rounds.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from scripts.bench.common import Report
from scripts.bench.options import checkpoint_of
from scripts.bench.peer_worker import our_engine
from scripts.bench.peers import loads_of
from scripts.bench.runs import Jobs
from scripts.bench.turns import Timing, seconds_of

import torch

from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.layers import native
from mini_engine.layers.packed_layers import PackedModel

FIRST, LATER, DECODE = "first step of prompts", "later steps of prompts", "decode"


class Part(NamedTuple):
    """One kind of step in one run of the load: the number of steps, prompt tokens, seconds in total and by part."""

    steps: int
    tokens: int
    seconds: float
    parts: dict[str, float]


def measure(args) -> Report:
    """Answer the load in rounds, and report the time of its steps."""
    engine = our_engine({"model": checkpoint_of(args), "dtype": args.dtype, "pool_gib": 1})
    model: Any = engine.runner.model
    kernel = load_kernel("auto", torch.device("cpu"), model.dtype)
    if not isinstance(model.model, PackedModel) or getattr(kernel, "name", "") != "cpu":
        raise UserError("--prefill and --shared time lesson 9's C++ from within, and there is no compiler for it here")
    loads, which = loads_of(model.config.vocab_size, args.quick), "prefill" if args.prefill else "shared"
    ((name, jobs),) = [item for item in loads.items() if item[0].startswith(which)]
    run_once(engine, jobs)
    matrices = onednn_matrices(model, sum(len(ids) for ids, _ in jobs))
    runs, onednn = [], []
    for _ in range(args.rounds or (2 if args.quick else 7)):
        onednn.append(seconds_of(matrices) if args.prefill else 0.0)
        runs.append(run_once(engine, jobs))
    notes = [f"{checkpoint_of(args)}, {args.dtype}; {name}"]
    if args.prefill:
        notes.append(f"oneDNN takes {1e3 * Timing(onednn).median:.0f} ms for the same matrices in the same rounds")
    return Report("step", rows_of(runs), notes)


def run_once(engine: Engine, jobs: Jobs) -> dict[str, Part]:
    """Answer the load from an empty tree, and sum up its steps by kind."""
    found: dict[str, Part] = {}
    engine.scheduler.manager.coordinator.clear()
    for i, (ids, wanted) in enumerate(jobs):
        engine.add_request(str(i), ids, SamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True))
    while engine.has_unfinished:
        with engine.runner.model.model.timed() as seconds:
            begun = time.perf_counter()
            tokens = engine.step().stats.prefill_tokens
            took = time.perf_counter() - begun
        kind = DECODE if not tokens else LATER if found else FIRST
        parts = dict(zip(native.PARTS, seconds.mean(0).tolist(), strict=True))
        before = found.get(kind, Part(0, 0, 0.0, dict.fromkeys(parts, 0.0)))
        sums = {part: before.parts[part] + parts[part] for part in parts}
        found[kind] = Part(before.steps + 1, before.tokens + tokens, before.seconds + took, sums)
    return found


def rows_of(runs: list[dict[str, Part]]) -> list[dict[str, Any]]:
    """Return a row for each kind of step, of medians over the runs."""
    whole = Timing([sum(part.seconds for part in run.values()) for run in runs])
    rows = []
    for kind, head in runs[0].items():
        timing = Timing([run[kind].seconds for run in runs])
        parts = {name: Timing([run[kind].parts[name] for run in runs]).median for name in head.parts}
        rows.append(
            {"steps": kind, "count": head.steps, "prompt tokens": head.tokens, "ms": timing.median * 1e3}
            | {"± %": timing.spread * 100, "% of load": 100 * timing.median / whole.median}
            | {name: seconds * 1e3 for name, seconds in parts.items()}
            | {"the rest": max(0.0, timing.median - sum(parts.values())) * 1e3}
        )
    return rows


def onednn_matrices(model, rows: int) -> Callable[[], None]:
    """Return a call of oneDNN's packed linears for all layers: q, k and v as one matrix, gate and up as another."""
    linears = model.model.layers[0].linears
    packs = model.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    pairs = []
    for names in (("q", "k", "v"), ("o",), ("gate", "up"), ("down",)):
        outputs, inputs = sum(linears[n].packed.out_features for n in names), linears[names[0]].packed.in_features
        weight, x = (torch.randn(size, inputs).to(model.dtype) for size in (outputs, rows))
        pairs.append((x, torch.ops.mkldnn._reorder_linear_weight(weight, rows) if packs else weight))

    @torch.inference_mode()
    def run() -> None:
        for _ in range(model.config.num_hidden_layers):
            for x, weight in pairs:
                if packs:
                    torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
                else:
                    torch.nn.functional.linear(x, weight)

    return run
