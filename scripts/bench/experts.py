"""Course machinery. Suite `experts`: decode with experts, beside a dense model of the active and of the whole size.

The three models differ only in their feed-forward blocks: one with as many weights as a token passes, one with as many
divided among experts, and one with as many as all experts have. Weights are random, so a router spreads tokens evenly:
a batch of trained text meets fewer experts. All three decode in turns.
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from scripts.bench.behind import decoding, engine_behind, with_random_weights
from scripts.bench.common import Report
from scripts.bench.options import add_batches, add_dtype, add_threads
from scripts.bench.turns import Timing, clock_of, gather_turns

import torch

from mini_engine.checkpoint.config import DTYPES, Qwen3Config
from mini_engine.engine.engine import Engine
from mini_engine.engine.runner import ModelRunner
from mini_engine.experts.router import SoftmaxRouter
from mini_engine.families import family_named
from mini_engine.families.qwen3_moe import Qwen3MoeConfig
from mini_engine.model.kinds import FULL

HISTORY, NEW = 32, 4
EXPERTS, CHOSEN, WIDTH = 32, 4, 384
LAYERS, HIDDEN = 8, 512
ACTIVE, SPARSE, WHOLE = "dense, as active", "experts", "dense, as a whole"
BATCHES = (1, 4, 16, 64)
COMMON: dict[str, Any] = dict(
    vocab_size=8192,
    hidden_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    tie_word_embeddings=True,
)
CONFIGS: dict[str, Qwen3Config] = {
    ACTIVE: Qwen3Config(**COMMON, intermediate_size=CHOSEN * WIDTH),
    SPARSE: Qwen3MoeConfig(
        **COMMON,
        intermediate_size=CHOSEN * WIDTH,
        layer_types=(FULL,) * LAYERS,
        num_experts=EXPERTS,
        routed_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=WIDTH,
        norm_topk_prob=True,
    ),
    WHOLE: Qwen3Config(**COMMON, intermediate_size=EXPERTS * WIDTH),
}


def add_arguments(parser) -> None:
    """Add this suite's options."""
    add_batches(parser, BATCHES)
    add_dtype(parser, "float32")
    add_threads(parser, 1)


def run(args: Namespace) -> Report:
    """Measure decode steps of every batch size."""
    batches = list(args.batches)[:2] if args.quick else args.batches
    rounds = args.rounds or (2 if args.quick else 7)
    rows = [row_of(batch, rounds, args) for batch in batches]
    notes = [
        f"{LAYERS} layers, hidden size {HIDDEN}, {args.dtype}",
        f"{CHOSEN} of {EXPERTS} experts of width {WIDTH}; dense models of width {CHOSEN * WIDTH} and {EXPERTS * WIDTH}",
        f"expected: {EXPERTS} · (1 - (1 - {CHOSEN}/{EXPERTS})^batch) experts in each layer, if tokens choose evenly",
    ]
    return Report("experts", rows, notes)


def row_of(batch: int, rounds: int, args: Namespace) -> dict[str, Any]:
    """Return the times of a decode step of `batch` requests, and how many experts it met in a layer."""
    engines = {name: engine_of(config, batch, rounds, args) for name, config in CONFIGS.items()}
    met = experts_met(engine_of(CONFIGS[SPARSE], batch, rounds, args, backend="torch"))  # packed routers are C++
    clock = clock_of(args)
    timings: Mapping[str, Timing] = gather_turns(
        {name: decoding(engine, NEW, clock) for name, engine in engines.items()}, rounds, f"{batch} at once"
    )
    steps = {name: timing.median / NEW * 1e3 for name, timing in timings.items()}
    return {
        "requests": batch,
        "experts met": met,
        "expected": EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** batch),
        **{f"{name}, ms": steps[name] for name in CONFIGS},
        "experts / active": steps[SPARSE] / steps[ACTIVE],
        "whole / experts": steps[WHOLE] / steps[SPARSE],
        "± %": max(timing.spread for timing in timings.values()) * 100,
    }


def engine_of(config: Qwen3Config, batch: int, rounds: int, args: Namespace, **options: Any) -> Engine:
    """Return an engine with `batch` requests that decode after texts that were never computed."""
    torch.manual_seed(0)
    model = with_random_weights(family_named(config.model_type).build(config), DTYPES[args.dtype])
    return engine_behind(model, batch, HISTORY, NEW * (rounds + 3), **options)


def experts_met(engine: Engine) -> float:
    """Run a step of torch's layers; return the mean number of different experts in a layer."""
    assert isinstance(engine.runner, ModelRunner)
    met: list[int] = []
    routers = [module for module in engine.runner.model.modules() if isinstance(module, SoftmaxRouter)]
    hooks = [router.register_forward_hook(lambda _, __, out: met.append(len(out[0].unique()))) for router in routers]
    engine.step()
    for hook in hooks:
        hook.remove()
    return sum(met) / len(met)
