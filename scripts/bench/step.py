"""Course machinery. Suite `step`: where a decode step's time goes, each part against the machine's limit.

A whole step is timed; then the model alone, its linears alone, its attention alone, the sampler, and the engine
without a model. The differences are the rest: norms, RoPE, activation and the write of K and V in the model, and the
Python code between the parts in the engine. A part's limit is the time to read its bytes, or to do its arithmetic if
that takes longer, at the rates measured in this run: reading in the same rounds, arithmetic just before.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.bench import step_parts
from scripts.bench.behind import decoding_scheduler
from scripts.bench.common import Report
from scripts.bench.options import add_batches, add_checkpoint, checkpoint_of
from scripts.bench.peers import weight_bytes
from scripts.bench.predicted import Cost, step_costs
from scripts.bench.scheduler import NoModel
from scripts.bench.turns import READ_BYTES, Timing, memory_reader, take_turns

import torch
import torch.nn.functional as F
from torch import nn

from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from mini_engine.checkpoint.config import DTYPES
from mini_engine.cli.parser import whole_number
from mini_engine.engine.engine import Engine
from mini_engine.engine.runner import ModelRunner, plan_step
from mini_engine.engine.sampler import sample
from mini_engine.families.qwen3 import load_model
from mini_engine.kv.block_tensor import KvPool
from mini_engine.layers import speed_up

HISTORY, ROOM = 256, 256
BATCHES = (1, 8, 16, 32)
PARTS = ("linears", "attention", "rest of the model", "sampling", "schedule and plan", "rest of the engine")
READ = ("", "read")  # the contender that only reads memory
PLAIN, FAST = "lessons 0 to 8", "lesson 9"


def add_arguments(parser) -> None:
    """Add this suite's options."""
    add_checkpoint(parser)
    add_batches(parser, BATCHES)
    parser.add_argument("--history", type=whole_number(1), default=HISTORY, metavar="N", help="default: 256")
    parser.add_argument("--prefill", action="store_true", help="take a prefill step apart instead")
    parser.add_argument("--shared", action="store_true", help="take the load with a shared beginning apart instead")


def linears_of(model) -> list[tuple[Callable, int]]:
    """Return every linear layer (plain, packed or oneDNN's) with its number of inputs, the head last."""
    found = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            found.append((module, module.in_features))
        elif hasattr(module, "packed"):
            found.append((module, module.packed.in_features))
        elif type(module).__name__ == "TorchLinear":
            found.append((module, module.weight.shape[1]))
    if model.lm_head is None:
        found.append((lambda x: F.linear(x, model.head_weight), model.config.hidden_size))
    return found


def contenders(model, batch: int, history: int) -> dict[str, Callable[[], Any]]:
    """Return the contenders: whole step, model, linears, attention, sampling, and the engine without a model."""
    config, dtype = model.config, model.dtype
    scheduler = decoding_scheduler(batch, history, room=ROOM)
    kernel = load_kernel("auto", torch.device("cpu"), dtype)
    pool = KvPool(config, scheduler.manager.num_usable_blocks + 1, 16, kernel, dtype)
    for layer in (*pool.K, *pool.V):
        layer.zero_()  # Linux backs all unwritten pages with one page of zeros, which would be read from the cache
    engine = Engine(config, scheduler, ModelRunner(model, pool))
    chunks = scheduler.schedule()
    plan, rows = plan_step(chunks, 16, pool.device), [chunk.request for chunk in chunks]
    linears = [(linear, torch.randn(batch, inputs).to(dtype)) for linear, inputs in linears_of(model)]
    q = torch.randn(batch, config.num_attention_heads, config.head_dim).to(dtype)
    logits = torch.randn(batch, config.vocab_size).to(dtype)
    bare = Engine(config, decoding_scheduler(batch, history, room=ROOM), NoModel(batch))
    return {
        "step": engine.step,
        "model": lambda: model(plan.token_ids, pool, plan.meta, rows=plan.rows),
        "linears": lambda: [linear(x) for linear, x in linears],
        "attention": lambda: [pool.attend(layer, q, plan.meta) for layer in range(config.num_hidden_layers)],
        "sampling": lambda: sample(logits, rows),
        "schedule and plan": bare.step,
    }


def limits(config, num_bytes: int, batch: int, history: int, rates, dtype) -> dict[str, float]:
    """Return each part's lower bound in seconds: reading its bytes, or its arithmetic if that takes longer."""
    costs = {
        "linears": Cost(num_bytes, 2 * batch * num_bytes / dtype.itemsize),
        "attention": step_costs(config, batch, history, dtype)["attention"],
        "sampling": Cost(batch * config.vocab_size * dtype.itemsize),
    }
    return {part: cost.seconds(rates, dtype) for part, cost in costs.items()}


def parts_of(timings: dict[str, Timing]) -> dict[str, float]:
    """Return median seconds per part. A rest is the whole minus its parts, at least 0."""
    seconds = {name: timing.median for name, timing in timings.items()}
    in_model = seconds["linears"] + seconds["attention"]
    in_engine = seconds["model"] + seconds["sampling"] + seconds["schedule and plan"]
    rests = {
        "rest of the model": max(0.0, seconds["model"] - in_model),
        "rest of the engine": max(0.0, seconds["step"] - in_engine),
    }
    return {part: (seconds | rests)[part] for part in PARTS}


def rows_of(variant: str, batch: int, timings: dict[str, Timing], least: dict[str, float]) -> list[dict[str, Any]]:
    """Return a row for each part and one for the whole step."""
    parts = parts_of(timings) | {"whole step": timings["step"].median}
    least = least | {"whole step": sum(least.values())}
    spread = {"rest of the model": "model", "whole step": "step", "rest of the engine": "step"}
    return [
        {
            "step": f"{batch} at once, {variant}",
            "part": part,
            "ms": seconds * 1e3,
            "± %": timings[spread.get(part, part)].spread * 100,
            "% of step": 100 * seconds / parts["whole step"],
            "limit, ms": least[part] * 1e3 if part in least else None,
            "% of limit": 100 * least[part] / seconds if part in least and seconds else None,
        }
        for part, seconds in parts.items()
    ]


def variants(model_dir: Path, dtype) -> tuple[dict[str, Any], list[str]]:
    """Return the plain model and, if available, the one with lesson 9's layers; a note says why if not."""
    models: dict[str, Any] = {PLAIN: load_model(model_dir, dtype)}
    notes = []
    try:
        models[FAST] = speed_up(load_model(model_dir, dtype))
    except UserError as why:
        notes.append(f"left out: lesson 9; {why}")
    return models, notes


def run(args) -> Report:
    """Measure every batch size, plain and fast, in interleaved rounds; or a prefill step."""
    if args.prefill or args.shared:
        return step_parts.measure(args)
    dtype, directory = DTYPES[args.dtype], checkpoint_of(args)
    num_bytes = weight_bytes(directory, dtype.itemsize)
    models, notes = variants(directory, dtype)
    notes.insert(0, f"{directory}, {args.dtype}, {args.history} tokens of history per sequence, greedy")
    rounds, rows = args.rounds or (5 if args.quick else 15), []
    for batch in args.batches[:2] if args.quick else args.batches:
        with torch.inference_mode():
            turns = {
                (variant, what): work
                for variant, model in models.items()
                for what, work in contenders(model, batch, args.history).items()
            }
            timings = take_turns(turns | {READ: memory_reader()}, rounds, f"{batch} at once")
        rates = replace(args.rates, read=READ_BYTES / timings.pop(READ).median)  # as in these rounds
        notes.append(f"{batch} at once: memory read at {rates.read / 1e9:.1f} GB/s in the same rounds")
        for variant, model in models.items():
            own = {what: timing for (whose, what), timing in timings.items() if whose == variant}
            least = limits(model.config, num_bytes, batch, args.history, rates, dtype)
            rows += rows_of(variant, batch, own, least)
    return Report("step", rows, notes)


def draw(report: Report, path: Path) -> None:
    """Draw a bar for each step, divided into its parts, and a line at the limit."""
    from scripts.bench.plot import INK, SERIES, canvas

    steps: dict[str, dict[str, dict]] = {}
    for row in report.rows:
        steps.setdefault(row["step"], {})[row["part"]] = row
    height = 1.2 + 0.36 * len(steps)
    with canvas(path, 6.4, height, "Where a decode step's time goes, by its parts, in milliseconds") as figure:
        axes = figure.add_axes((0.3, 0.5 / height, 0.64, 1 - 1.2 / height))
        for place, parts in enumerate(steps.values()):
            left = 0.0
            for part, color in zip(PARTS, SERIES, strict=True):
                label = part if place == 0 else None
                axes.barh(place, parts[part]["ms"], left=left, color=color, height=0.62, label=label)
                left += parts[part]["ms"]
            limit = parts["whole step"]["limit, ms"]
            axes.plot([limit, limit], [place - 0.4, place + 0.4], color=INK, linewidth=1.6)
        axes.set_yticks(range(len(steps)), list(steps))
        axes.set_ylim(len(steps) - 0.5, -0.5)
        axes.set_xlabel("ms per step; upright line: the machine's limit in this run")
        figure.legend(loc="upper center", ncol=3, fontsize=9)
