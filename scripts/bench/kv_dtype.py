"""Course machinery. Suite `kv_dtype`: int8 and int4 K and V against full precision: predictions, memory, attention.

    quality    NLL and KL against full precision, on held-out text and on a random model; with plain int4
    answers    the number of tokens that change, and KL
    methods    KL by method of rounding and bits, which --plot draws
    memory     bytes a token takes, and tokens per GiB
    attention  one layer's attention over long histories, in the C++ kernel
    decode     one token after a long history, through a whole model with random weights

All kinds of pool take turns.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from scripts.bench.behind import with_random_weights
from scripts.bench.common import Report
from scripts.bench.kv_methods import answer_rows, draw_methods, method_rows
from scripts.bench.kv_quality import compare, heavy_tailed, held_out, text_of
from scripts.bench.options import add_choice, add_threads
from scripts.bench.turns import clock_of, take_turns
from scripts.make_random_qwen3 import SHAPES

import torch
from torch import Tensor

from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.kv.block_table import NULL_BLOCK
from mini_engine.kv.block_tensor import ForwardMeta, KvPool
from mini_engine.layers.fast_model import speed_up
from mini_engine.model.qwen3 import qwen3_model
from mini_engine.quantized.formats import FORMATS
from mini_engine.quantized.pool import RowKvPool, bytes_per_token

PARTS = ("quality", "answers", "methods", "memory", "attention", "decode")
SHAPE = "0.6B"
BLOCK_SIZE = 16
LONG = (4096, 16_384, 32_768)  # tokens that one layer attends to
HISTORIES = (1024, 16_384)  # tokens before a step of the whole model
Row = dict[str, Any]


def add_arguments(parser) -> None:
    """Add this suite's options."""
    add_choice(parser, "parts", PARTS)
    parser.add_argument("--text", type=Path, metavar="FILE", help="also compare the pocket model's predictions over it")
    add_threads(parser, default=1)


def run(args: Namespace) -> Report:
    """Measure the parts asked for."""
    parts = {"memory": memory_rows, "attention": attention_rows, "decode": decode_rows}
    with torch.inference_mode():
        found = [{"part": part} | row for part in parts if part in args.parts for row in parts[part](args)]
        judged = quality_rows(args.text) if "quality" in args.parts else []
        judged += answer_rows() if "answers" in args.parts else []
        judged += method_rows() if "methods" in args.parts else []
    notes = [
        f"speed: the {SHAPE} shape, attention in one layer, queries in bfloat16, blocks of {BLOCK_SIZE}; "
        f"{'processor' if args.threads == 1 else 'wall clock'} time"
    ]
    return Report("kv_dtype", found, notes, more=judged)


def draw(report: Report, path: Path) -> None:
    """Draw KL by method and bits."""
    rows = [row for row in report.more if "bits" in row]
    if not rows:
        raise UserError("only the part 'methods' can be drawn; add --parts methods, or leave out --plot")
    draw_methods(rows, path)


def quality_rows(text: Path | None) -> list[Row]:
    """Compare predictions over held-out text and a file's (the pocket model), and a random model's own text."""
    rows, cases = [], [("pocket, held-out", held_out()), ("random, its own", heavy_tailed())]
    if text:
        cases.append((f"pocket, {text.name}", text_of(text)))
    for name, (model, texts) in cases:
        found = compare(model, texts)
        rows += [
            {
                "what": f"{name}: {kind}",
                "NLL": round(one.nll, 5),
                "NLL rise": one.nll - found["full"].nll,
                "KL": one.kl,
                "worst KL": one.worst,
            }
            for kind, one in found.items()
        ]
    return rows


def memory_rows(args: Namespace) -> list[Row]:
    """Count the bytes of a token in all layers."""
    rows = []
    for name in (SHAPE, "pocket"):
        config = Qwen3Config(**SHAPES[name])
        full = config.kv_bytes_per_token(torch.bfloat16)
        sizes = {"bfloat16": full} | {kind: bytes_per_token(config, format) for kind, format in FORMATS.items()}
        rows += [
            {"what": f"{name}: {kind}", "bytes a token": size, "tokens per GiB": 2**30 // size, "×": full / size}
            for kind, size in sizes.items()
        ]
    return rows


# ---------------------------------------------------------------- speed


class Filled(NamedTuple):
    """A pool of each kind with the same K and V, and the query of a step of one sequence."""

    pools: dict[str, KvPool]
    q: Tensor
    meta: ForwardMeta


def filled_pools(kv_len: int, num_layers: int = 1) -> Filled:
    """Return filled pools, with the sequence's blocks scattered as in a pool that has been in use."""
    torch.manual_seed(0)
    config = replace(Qwen3Config(**SHAPES[SHAPE]), num_hidden_layers=num_layers)
    per = -(-kv_len // BLOCK_SIZE)
    cpu = "cpu", "cpu", torch.bfloat16
    pools = {"bfloat16": KvPool(config, 1 + per, BLOCK_SIZE, load_kernel(*cpu), torch.bfloat16)}
    for kind, rows in FORMATS.items():
        pools[kind] = RowKvPool(rows, config, 1 + per, BLOCK_SIZE, load_kernel(*cpu, rows.name))
    slots = torch.arange((1 + per) * BLOCK_SIZE)
    k, v = (torch.randn(len(slots), config.num_key_value_heads, config.head_dim).bfloat16() for _ in range(2))
    for pool in pools.values():
        for layer in range(num_layers):
            pool.set_kv(layer, slots, k, v)
    table, last = NULL_BLOCK + 1 + torch.randperm(per), kv_len - 1
    meta = ForwardMeta(
        positions=torch.tensor([last]),
        slot_mapping=table[last // BLOCK_SIZE, None] * BLOCK_SIZE + last % BLOCK_SIZE,
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens_kv=torch.tensor([kv_len], dtype=torch.int32),
        block_table=table[None].int(),
        block_size=BLOCK_SIZE,
    )
    return Filled(pools, torch.randn(1, config.num_attention_heads, config.head_dim).bfloat16(), meta)


def attention_rows(args: Namespace) -> list[Row]:
    """Time attention over each history, all pools in turn."""
    rows = []
    for history in LONG[1:2] if args.quick else LONG:
        pools, q, meta = filled_pools(history)
        contenders = {name: partial(pool.attend, 0, q, meta) for name, pool in pools.items()}
        rows += timed(f"1 × {history} decode", contenders, args)
    return rows


def decode_rows(args: Namespace) -> list[Row]:
    """Time one token after each history through a whole model, all pools in turn."""
    config = Qwen3Config(**SHAPES[SHAPE], tie_word_embeddings=True)
    model = with_random_weights(qwen3_model(config), torch.bfloat16)
    fast, token, rows = speed_up(model), torch.tensor([1]), []
    for history in HISTORIES:
        pools, _, meta = filled_pools(history, config.num_hidden_layers)
        contenders = {name: partial(fast, token, pool, meta) for name, pool in pools.items()}
        rows += timed(f"decode after {history}", contenders, args)
    return rows


def timed(title: str, contenders: dict[str, Callable[[], Any]], args: Namespace) -> list[Row]:
    """Return a row for each contender; × is the speed relative to the first."""
    timings = take_turns(contenders, args.rounds or (9 if args.quick else 41), title, clock_of(args))
    first = next(iter(timings.values())).median
    return [
        {"what": f"{title}: {name}", "ms": one.median * 1e3, "± %": one.spread * 100, "×": first / one.median}
        for name, one in timings.items()
    ]
