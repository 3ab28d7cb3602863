"""Course machinery. Suite `kv_dtype`: int8 K and V beside full precision: predictions, memory, attention.

    quality    NLL and KL against full precision, on held-out text and on a random model; int4 is what goes wrong
    memory     bytes a token takes, and tokens per GiB
    attention  one layer's attention over long histories, in the C++ kernel
    decode     one token after a long history, through a whole model with random weights

Both kinds of pool take turns.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from scripts.bench.common import Report
from scripts.bench.kv_quality import compare, heavy_tailed, held_out, text_of
from scripts.bench.options import add_choice, add_threads
from scripts.bench.turns import clock_of, take_turns
from scripts.make_random_qwen3 import SHAPES

import torch
from torch import Tensor

from mini_engine.attention.registry import load_kernel
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.int8 import kernels as int8_kernels
from mini_engine.int8.pool import Int8KvPool, bytes_per_token
from mini_engine.kv.block_table import NULL_BLOCK
from mini_engine.kv.block_tensor import ForwardMeta, KvPool
from mini_engine.layers.fast_model import speed_up
from mini_engine.model.qwen3 import Qwen3ForCausalLM

PARTS = ("quality", "memory", "attention", "decode")
SHAPE = "0.6B"
BLOCK_SIZE = 16
LONG = (4096, 16_384, 32_768)  # tokens that one layer attends to
HISTORIES = (1024, 16_384)  # tokens before a step of the whole model
STD = 0.02
Row = dict[str, Any]


def add_arguments(parser) -> None:
    """Add this suite's options."""
    add_choice(parser, "parts", PARTS)
    parser.add_argument("--text", type=Path, metavar="FILE", help="compare the pocket model's predictions over it, too")
    add_threads(parser, default=1)


def run(args: Namespace) -> Report:
    """Measure the parts asked for."""
    parts = {"memory": memory_rows, "attention": attention_rows, "decode": decode_rows}
    with torch.inference_mode():
        found = [{"part": part} | row for part in parts if part in args.parts for row in parts[part](args)]
        quality = quality_rows(args.text) if "quality" in args.parts else []
    notes = [
        f"speed: the {SHAPE} shape, attention in one layer, bfloat16 against int8, blocks of {BLOCK_SIZE}; "
        f"{'processor' if args.threads == 1 else 'wall clock'} time"
    ]
    return Report("kv_dtype", found, notes, more=quality)


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
        full, int8 = config.kv_bytes_per_token(torch.bfloat16), bytes_per_token(config)
        for kind, size in (("bfloat16", full), ("int8", int8)):
            rows.append(
                {"what": f"{name}: {kind}", "bytes a token": size, "tokens per GiB": 2**30 // size, "×": full / size}
            )
    return rows


# ---------------------------------------------------------------- speed


class Both(NamedTuple):
    """A pool of each kind with the same K and V, and the query of a step of one sequence."""

    full: KvPool
    int8: Int8KvPool
    q: Tensor
    meta: ForwardMeta


def both_pools(kv_len: int, num_layers: int = 1) -> Both:
    """Return filled pools, with the sequence's blocks scattered as in a pool that has been in use."""
    torch.manual_seed(0)
    config = replace(Qwen3Config(**SHAPES[SHAPE]), num_hidden_layers=num_layers)
    per = -(-kv_len // BLOCK_SIZE)
    full = KvPool(config, 1 + per, BLOCK_SIZE, load_kernel("cpu", "cpu", torch.bfloat16), torch.bfloat16)
    int8 = Int8KvPool(config, 1 + per, BLOCK_SIZE, int8_kernels.load_kernel("cpu", "cpu", torch.bfloat16))
    slots = torch.arange((1 + per) * BLOCK_SIZE)
    k, v = (torch.randn(len(slots), config.num_key_value_heads, config.head_dim).bfloat16() for _ in range(2))
    for layer in range(num_layers):
        full.set_kv(layer, slots, k, v)
        int8.set_kv(layer, slots, k, v)
    table, last = NULL_BLOCK + 1 + torch.randperm(per), kv_len - 1
    meta = ForwardMeta(
        positions=torch.tensor([last]),
        slot_mapping=table[last // BLOCK_SIZE, None] * BLOCK_SIZE + last % BLOCK_SIZE,
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens_kv=torch.tensor([kv_len], dtype=torch.int32),
        block_table=table[None].int(),
        block_size=BLOCK_SIZE,
    )
    return Both(full, int8, torch.randn(1, config.num_attention_heads, config.head_dim).bfloat16(), meta)


def attention_rows(args: Namespace) -> list[Row]:
    """Time attention over each history, both pools in turn."""
    rows = []
    for history in LONG[1:2] if args.quick else LONG:
        both = both_pools(history)
        pools = {"bfloat16": both.full, "int8": both.int8}
        contenders = {
            name: lambda pool=pool, both=both: pool.attend(0, both.q, both.meta) for name, pool in pools.items()
        }
        rows += timed(f"1 × {history} decode", contenders, args)
    return rows


def decode_rows(args: Namespace) -> list[Row]:
    """Time one token after each history through a whole model, both pools in turn."""
    config = Qwen3Config(**SHAPES[SHAPE], tie_word_embeddings=True)
    model = Qwen3ForCausalLM(config).bfloat16().eval().requires_grad_(False)
    for weight in model.parameters():
        weight.fill_(1.0) if weight.dim() == 1 else weight.normal_(std=STD)
    fast, token, rows = speed_up(model), torch.tensor([1]), []
    for history in HISTORIES:
        both = both_pools(history, config.num_hidden_layers)
        contenders = {
            "bfloat16": lambda both=both: fast(token, both.full, both.meta),
            "int8": lambda both=both: fast(token, both.int8, both.meta),
        }
        rows += timed(f"decode after {history}", contenders, args)
    return rows


def timed(title: str, contenders: dict[str, Callable[[], Any]], args: Namespace) -> list[Row]:
    """Return a row for each contender; × is the speed beside the first."""
    timings = take_turns(contenders, args.rounds or (9 if args.quick else 41), title, clock_of(args))
    first = next(iter(timings.values())).median
    return [
        {"what": f"{title}: {name}", "ms": one.median * 1e3, "± %": one.spread * 100, "×": first / one.median}
        for name, one in timings.items()
    ]
