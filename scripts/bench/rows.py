"""Lesson 14. Suite `rows`: the cost of one more row in a decode step, and of finding a guess. No engine.

Only the model runs: it computes one sequence's last tokens, a row each, after the same history. A lookup in a text of
random tokens finds nothing, which is its longest search.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from scripts.bench.common import Report
from scripts.bench.options import add_checkpoint, add_threads, checkpoint_of
from scripts.bench.turns import clock_of, take_turns

import torch

from mini_engine.attention.registry import load_kernel
from mini_engine.checkpoint.config import DTYPES
from mini_engine.engine.request import Request
from mini_engine.engine.runner import plan_step
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Chunk
from mini_engine.families.qwen3 import load_model
from mini_engine.kv.block_tensor import KvPool
from mini_engine.kv.radix import RadixTree
from mini_engine.kv.radix_node import key_of
from mini_engine.layers import speed_up
from mini_engine.speculation.lookup import Text, find_continuation
from mini_engine.speculation.options import Speculation
from mini_engine.speculation.tree_lookup import continuation

ROWS = (1, 5, 9, 16)
HISTORY, BLOCK_SIZE = 256, 16
TEXT_TOKENS = 8192
CALLS = 200  # of a lookup, timed together


def add_arguments(parser) -> None:
    """Add this suite's options."""
    add_checkpoint(parser)
    add_threads(parser)


@torch.inference_mode()
def run(args) -> Report:
    """Time a step by its rows, and the lookups."""
    clock = clock_of(args)
    steps = take_turns(model_steps(args), 3 if args.quick else args.rounds or 15, "steps", clock)
    rows: list[dict[str, Any]] = [
        {"what": f"a step of {count} rows", "ms": timing.median * 1e3, "x": timing.median / steps[1].median}
        for count, timing in steps.items()
    ]
    found = take_turns(lookups(), 5, "lookups", clock)
    rows += [{"what": name, "ms": timing.median / CALLS * 1e3} for name, timing in found.items()]
    return Report("rows", rows, [f"one sequence of {HISTORY} tokens; lookups in {TEXT_TOKENS:,} tokens"])


def model_steps(args) -> dict[int, Callable[[], Any]]:
    """Return, by the number of rows, a forward pass with the logits of all of them."""
    model = speed_up(load_model(checkpoint_of(args), DTYPES[args.dtype]))
    blocks = -(-(HISTORY + ROWS[-1]) // BLOCK_SIZE)
    kernel = load_kernel("auto", "cpu", model.dtype)
    pool = KvPool(model.config, blocks + 1, BLOCK_SIZE, kernel, model.dtype, model.device)
    steps = {}
    for count in ROWS:
        request = Request("0", [7] * (HISTORY + count), SamplingParams())
        chunk = Chunk(request, HISTORY, HISTORY + count, torch.arange(1, blocks + 1).int().tolist())  # type: ignore
        step = plan_step([chunk], BLOCK_SIZE, model.device)
        steps[count] = partial(model, step.token_ids, pool, step.meta, rows=torch.arange(count))
    return steps


def lookups() -> dict[str, Callable[[], Any]]:
    """Return the searches that find nothing in a long text, each made CALLS times."""
    ids = [*random.Random(0).sample(range(150_000), TEXT_TOKENS)]  # no token twice
    settings, text, tree = Speculation(), Text(), RadixTree(BLOCK_SIZE)
    text.follow(ids)
    tree.insert(ids, list(range(1, TEXT_TOKENS // BLOCK_SIZE + 1)))
    key = key_of(ids)
    calls = {
        "a lookup that finds nothing": partial(find_continuation, text, settings.max_ngram, settings.min_ngram),
        "the tree's continuation": partial(continuation, tree, key, None, 8),
        "packing as many tokens": partial(key_of, ids),
    }
    return {name: partial(repeated, call) for name, call in calls.items()}


def repeated(call: Callable[[], Any]) -> None:
    """Make a call CALLS times."""
    for _ in range(CALLS):
        call()
