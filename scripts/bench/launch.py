"""Lesson 10. Suite `launch`: the host's work in a decode step, in launched operations and in time.

On a CPU, host and device are one processor, so the host's part is measured on a twin of the model: the same operations
in as many layers, but two numbers wide, with attention that returns its queries, so that there is next to nothing to
compute. A replay is a no-op here; on a GPU it is one call, whose time is extra. The kernels of fused layers are no-ops
too, but each is counted. One thread, like a host's.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from scripts.bench.behind import decoding_scheduler
from scripts.bench.common import Report
from scripts.bench.turns import take_turns

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mini_engine.attention.registry import load_kernel
from mini_engine.engine.engine import Engine
from mini_engine.engine.runner import ModelRunner
from mini_engine.families.qwen3 import load_model
from mini_engine.gpu.graphs import GraphRunner
from mini_engine.kv.block_tensor import KvPool
from mini_engine.layers.fused_layers import fuse
from mini_engine.model.qwen3 import qwen3_model
from mini_engine.pocket import POCKET_DIR

HISTORY, ROOM = 64, 2048
BATCHES = (1, 32)
DEEP = 28  # the layers of Qwen3-0.6B
TWIN = dict(hidden_size=2, intermediate_size=2, num_attention_heads=1, num_key_value_heads=1, head_dim=2, vocab_size=2)
ALLOCATES = ("aten::empty", "aten::new_empty", "aten::empty_like")


class Operations(TorchDispatchMode):
    """Counts operations that compute or copy, each of which is a launch on a GPU. Views and allocations are free."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if func._schema.is_mutable or (func._schema.name not in ALLOCATES and not shares_memory(out, args)):
            self.count += 1
        return out


def shares_memory(out: Any, args: tuple) -> bool:
    """Return True if the result is a view of the first argument or that argument itself (a cast to its own dtype)."""
    outs = out if isinstance(out, tuple | list) else (out,)
    tensors = [x for x in (*outs, *args[:1]) if isinstance(x, torch.Tensor)]
    return len(tensors) > 1 and len({x.untyped_storage().data_ptr() for x in tensors}) == 1


class Counted:
    """Counts calls of an attention kernel, which torch does not see. Without a kernel, returns the queries."""

    def __init__(self, kernel: Callable[..., torch.Tensor] | None = None) -> None:
        self.kernel, self.calls = kernel or (lambda q, *rest: q), 0

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.kernel(*inputs)


class CountedLayers:
    """Counts calls of the fused layers' kernels. They compute nothing: their results are views of their inputs."""

    def __init__(self) -> None:
        self.calls = 0

    def add_norm(self, x: Any, delta: Any, weight: Any, eps: float) -> torch.Tensor:
        self.calls += 1
        return x

    def norm_rope(
        self, qkv: Any, weights: Any, cos: Any, sin: Any, eps: float, rows: Any, k_out: Any, v_out: Any
    ) -> torch.Tensor:
        self.calls += 1
        kv_heads, dim = k_out.shape[-2:]
        return qkv.view(len(qkv), -1, dim)[:, : -2 * kv_heads]

    def silu_mul(self, gate_up: Any) -> torch.Tensor:
        self.calls += 1
        return gate_up[:, : gate_up.shape[1] // 2]


def twin_of(config, layers: int, fused: bool = False):
    """Return a model with `layers` layers that computes next to nothing; the layers may be lesson 10's fused ones."""
    twin = qwen3_model(replace(config, **TWIN, num_hidden_layers=layers)).requires_grad_(False)
    for weight in twin.parameters():
        weight.zero_()  # uninitialized memory may hold NaN, from which no token can be chosen
    return fuse(twin, CountedLayers()) if fused else twin


def nothing() -> None:
    """A replay that does nothing."""


def engine_of(model, batch: int, replayed: bool, kernel: Callable[..., torch.Tensor] | None = None):
    """Return an engine whose requests all decode, either plain or with replays that do nothing."""
    scheduler = decoding_scheduler(batch, HISTORY, room=ROOM, vocab_size=model.config.vocab_size)
    pool = KvPool(model.config, scheduler.manager.num_usable_blocks + 1, 16, Counted(kernel), model.dtype)
    eager = ModelRunner(model, pool)
    runner = GraphRunner(eager, batch, lambda work: nothing) if replayed else eager
    return Engine(model.config, scheduler, runner)


def operations_of(engine) -> int:
    """Count the host's launches in one step: torch operations and calls of kernels that torch does not see."""
    kernels = [engine.runner.pool.kernel, getattr(engine.runner.model.model.norm, "kernels", None)]
    unseen = [kernel for kernel in kernels if kernel is not None]
    before = sum(kernel.calls for kernel in unseen)
    with Operations() as operations:
        engine.step()
    return operations.count + sum(kernel.calls for kernel in unseen) - before


def run(args) -> Report:
    """Measure a step of the pocket model, and of its twins, plain and replayed."""
    torch.set_num_threads(1)
    pocket = load_model(POCKET_DIR)
    kernel, layers = load_kernel("auto"), pocket.config.num_hidden_layers
    twins = {f"{n} layers, nothing to compute": n for n in (layers, DEEP)}
    engines = {}
    for batch in BATCHES[:1] if args.quick else BATCHES:
        at_once = f"{batch} at once"
        engines[at_once, "the pocket model", "plain"] = engine_of(pocket, batch, replayed=False, kernel=kernel)
        for name, depth in twins.items():
            twin = twin_of(pocket.config, depth)
            engines[at_once, name, "plain"] = engine_of(twin, batch, replayed=False)
            engines[at_once, name, "fused"] = engine_of(twin_of(pocket.config, depth, fused=True), batch, False)
            engines[at_once, name, "replayed"] = engine_of(twin, batch, replayed=True)
    rounds = args.rounds or (60 if args.quick else 300)
    with patch("mini_engine.kv.block_tensor.check_slots", lambda *_: None):  # on a GPU it checks no slot
        counts = {key: operations_of(engine) for key, engine in engines.items()}
        timings = take_turns({key: engine.step for key, engine in engines.items()}, rounds, "launch")
    rows = [
        dict(zip(("sequences", "model", "step"), key, strict=True)) | {"operations": counts[key]} | timing.columns()
        for key, timing in timings.items()
    ]
    notes = [f"float32, greedy, a history of {HISTORY} tokens or more for each sequence; whole steps of the engine"]
    return Report("launch", rows, notes)
