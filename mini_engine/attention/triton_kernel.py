"""Lesson 3. Paged attention for GPUs, in Triton: one kernel for prefill, chunks and decode, and one that merges.

A program takes a tile of one sequence's queries, all query heads of one key/value head, and walks the block table.
Lengths stay on the GPU: `launch_config` lays the grid out for the most tiles there can be, and each program finds its
sequence by itself (as in vLLM's unified kernel), so that nothing waits for a copy to the host. A decode is a single
tile, however long its history; that is cut into splits by its own length, one program each, and a second kernel merges
them (flash-decoding: Dao and others, 2023). A window is compiled in.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from mini_engine.attention.contract import EVERY_KEY, Batch
from mini_engine.attention.triton_launch import MAX_SPLITS, MIN_SPLIT, LaunchConfig, launch_config
from mini_engine.base.errors import UserError

LOG2_E = 1.4426950408889634  # the kernels' exponentials are powers of two
LEAST, MOST, EVERY = tl.constexpr(MIN_SPLIT), tl.constexpr(MAX_SPLITS), tl.constexpr(EVERY_KEY)
DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def check_support(device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError unless the device is a GPU (or Triton's interpreter, which tests use) and the dtype supported."""
    if device.type != "cuda" and not knobs.runtime.interpret:
        raise UserError(f"the triton kernel needs a GPU, not {device}; TRITON_INTERPRET=1 runs it slowly on a CPU")
    if dtype not in DTYPES:
        raise UserError(f"the triton kernel takes float16, bfloat16 and float32, not {dtype}; ask for torch")


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float, window: int = EVERY_KEY
) -> Tensor:
    """Implement `mini_engine.attention.contract` on a GPU. Block ids are trusted: a check would wait for the device."""
    return launch(_load_rows, q, k_cache, v_cache, batch, scale, window)


def launch(
    load_rows: Any, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float, window: int = EVERY_KEY
) -> Tensor:
    """Run the kernel over caches that `load_rows`, a function like `_load_rows`, reads.

    Each query sees `window` keys, its own included. Keys before the windows of a tile's queries are not read.
    """
    num_rows, heads, dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    num_seqs, max_blocks = batch.block_table.shape
    q, block_table = q.contiguous(), batch.block_table.contiguous()
    out = torch.zeros_like(q)  # rows that belong to no sequence stay zero
    if not num_seqs or not num_rows:
        return out
    config = launch_config(
        num_rows=num_rows,
        num_seqs=num_seqs,
        group=heads // kv_heads,
        dim=dim,
        reach=min(max_blocks * block_size, window),
        tensor_cores=has_tensor_cores(q),
    )
    parts, stats = _partial_results(config, num_seqs, q)
    _attend[(config.tiles + num_seqs * (config.splits - 1), kv_heads)](
        q, k_cache, v_cache, batch.cu_seqlens_q, batch.seq_lens_kv, block_table, out, parts, stats, scale * LOG2_E,
        num_seqs, max_blocks, config.tiles, config.splits, LOAD_ROWS=load_rows, **constants(config, q, k_cache, window),
    )  # fmt: skip
    if config.needs_merge:
        sizes = dict(HEADS=heads, DIM=dim, WIDTH=config.width, SPLITS=config.padded_splits)
        fixed: dict[str, Any] = sizes | {"WINDOW": window}
        _merge[(num_seqs, heads)](parts, stats, out, batch.cu_seqlens_q, batch.seq_lens_kv, num_seqs, **fixed)
    return out


def has_tensor_cores(q: Tensor) -> bool:
    """Return True if Triton multiplies matrices of this dtype in the device's tensor cores: from sm_80 on."""
    return q.element_size() == 2 and (q.device.type != "cuda" or torch.cuda.get_device_capability(q.device) >= (8, 0))


def constants(config: LaunchConfig, q: Tensor, k_cache: Tensor, window: int = EVERY_KEY) -> dict[str, Any]:
    """Return the constants that Triton compiles into `_attend`. Each combination is a separate kernel."""
    block_size, kv_heads = k_cache.shape[1:3]
    return dict(
        KV_HEADS=kv_heads,
        GROUP=q.shape[1] // kv_heads,
        DIM=q.shape[2],
        WIDTH=config.width,
        BLOCK_SIZE=block_size,
        ROWS=config.rows,
        KEYS=config.keys,
        WINDOW=window,
        PARTIAL=config.needs_merge,
        OPERAND=tl.float32 if knobs.runtime.interpret else DTYPES[q.dtype],
        num_warps=config.warps,
    )


def _partial_results(config: LaunchConfig, num_seqs: int, q: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate each split's partial results of a decode: weighted values, and (largest score, sum of weights)."""
    shape = (config.splits, num_seqs, *q.shape[1:]) if config.needs_merge else (1, 1, 1, 1)
    parts = q.new_empty(shape, dtype=torch.float32)
    return parts, q.new_empty((*shape[:-1], 2), dtype=torch.float32)


@triton.jit
def _find_sequence(starts, num_seqs, tile, QUERIES: tl.constexpr):
    """Return a tile's sequence. Sequence s begins at tile starts[s] // QUERIES + s, so a few tiles stay empty."""
    low = tile * 0
    high = low + num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _find_work(starts, num_seqs, tile, tiles, splits, QUERIES: tl.constexpr):
    """Return a program's sequence, its part of the history, and the first query of its tile."""
    if tile < tiles:
        seq = _find_sequence(starts, num_seqs, tile, QUERIES)
        part = tile * 0
        first = (tile - tl.load(starts + seq) // QUERIES - seq) * QUERIES
    else:
        seq = (tile - tiles) // (splits - 1)
        part = (tile - tiles) % (splits - 1) + 1
        first = tile * 0
    return seq, part, first


@triton.jit
def _slots(row, token, end, BLOCK_SIZE: tl.constexpr):
    """Return the slots of tokens, from their sequence's row of the block table. Entries past `end` are not read."""
    block = tl.load(row + token // BLOCK_SIZE, mask=token < end, other=0)
    return block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE


@triton.jit
def _load_rows(cache, row, mask, d, DIM: tl.constexpr):
    """Load rows of the cache, `[KEYS, WIDTH]`: keys or values of one head, zero where `mask` is false."""
    return tl.load(cache + row[:, None] * DIM + d[None, :], mask=mask[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def _take_in(score, values, top, weight, total, OPERAND: tl.constexpr):
    """Do one step of the online softmax. Returns the new largest score, sum of weights and sum of weighted values."""
    new_top = tl.maximum(top, tl.max(score, 1))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row may see none of this split's keys
    p = tl.exp2(score - safe[:, None])
    shrink = tl.exp2(top - safe)
    weight = weight * shrink + tl.sum(p, 1)
    total = total * shrink[:, None] + tl.dot(p.to(OPERAND), values, input_precision="ieee")
    return new_top, weight, total


@triton.jit
def _store_part(parts, stats, at, top, weight, total, rows, elements, d, DIM: tl.constexpr):
    """Store one split's partial results for `_merge`."""
    tl.store(stats + at * 2, top, mask=rows)
    tl.store(stats + at * 2 + 1, weight, mask=rows)
    tl.store(parts + at[:, None] * DIM + d[None, :], total, mask=elements)


@triton.jit
def _split_of(keys):
    """Return the keys per program in a decode of `keys` keys. It depends on nothing else, so bits do not vary."""
    return tl.maximum(LEAST, (keys + MOST - 1) // MOST)


@triton.jit
def _keys_of(kv_len, position, part, is_shared, QUERIES: tl.constexpr, WINDOW: tl.constexpr):
    """Return begin and end of a program's keys: its part of those that a tile from `position` on sees."""
    seen = tl.minimum(kv_len, position + QUERIES)  # no query of the tile sees a key from here on
    lowest = tl.maximum(0, position + 1 - WINDOW)  # no query of the tile sees an earlier key
    split = tl.where(is_shared, _split_of(kv_len - lowest), kv_len)
    begin = lowest + part * split
    return begin, tl.minimum(seen, begin + split)


@triton.jit
def _visible(token, position, WINDOW: tl.constexpr):
    """Return True where a query at a position sees a token."""
    visible = token <= position
    if WINDOW < EVERY:
        visible &= token > position - WINDOW
    return visible


@triton.jit(do_not_specialize=["num_seqs", "max_blocks", "tiles", "splits"])  # they change from step to step
def _attend(
    q, k_cache, v_cache, starts, kv_lens, table, out, parts, stats, scale, num_seqs, max_blocks, tiles, splits,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, PARTIAL: tl.constexpr, OPERAND: tl.constexpr,
    LOAD_ROWS: tl.constexpr,
):  # fmt: skip
    QUERIES: tl.constexpr = ROWS // GROUP
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    seq, part, first = _find_work(starts, num_seqs, tile, tiles, splits, QUERIES)  # pyright: ignore
    start = tl.load(starts + seq)
    q_len, kv_len = tl.load(starts + seq + 1) - start, tl.load(kv_lens + seq)
    is_shared = (q_len == 1) & PARTIAL
    begin, end = _keys_of(kv_len, kv_len - q_len + first, part, is_shared, QUERIES, WINDOW)  # pyright: ignore
    if first >= q_len or begin >= end:
        return
    row, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    query = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    real = (row < QUERIES * GROUP) & (query < q_len)
    at = (start + query).to(tl.int64) * (KV_HEADS * GROUP) + head  # place in [T, H_q]
    element = real[:, None] & (d < DIM)[None, :]
    queries = tl.load(q + at[:, None] * DIM + d[None, :], mask=element, other=0.0).to(OPERAND)
    top, weight = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for key in range(begin, end, KEYS):
        token = key + tl.arange(0, KEYS)
        slot = _slots(table + seq.to(tl.int64) * max_blocks, token, end, BLOCK_SIZE)
        cache_row = slot * KV_HEADS + kv_head
        keys = LOAD_ROWS(k_cache, cache_row, token < end, d, DIM).to(OPERAND)  # a no-op, except that the interpreter's
        values = LOAD_ROWS(v_cache, cache_row, token < end, d, DIM).to(OPERAND)  # dot does not support bfloat16
        score = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        visible = (token < end)[None, :] & _visible(token[None, :], (kv_len - q_len + query)[:, None], WINDOW)
        top, weight, total = _take_in(tl.where(visible, score, float("-inf")), values, top, weight, total, OPERAND)
    if PARTIAL:  # _merge divides shared decodes
        at_part = (part.to(tl.int64) * num_seqs + seq) * (KV_HEADS * GROUP) + head  # place in [splits, S, H_q]
        _store_part(parts, stats, at_part, top, weight, total, real & is_shared, element & is_shared, d, DIM)
        element = element & (q_len > 1)
    tl.store(out + at[:, None] * DIM + d[None, :], total / weight[:, None], mask=element)


@triton.jit(do_not_specialize=["num_seqs"])
def _merge(
    parts, stats, out, starts, kv_lens, num_seqs,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0), tl.program_id(1)
    start, kv_len = tl.load(starts + seq), tl.load(kv_lens + seq)
    if tl.load(starts + seq + 1) - start != 1:
        return
    part, d = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    keys = tl.minimum(kv_len, WINDOW)
    written = part * _split_of(keys) < keys
    at = (part.to(tl.int64) * num_seqs + seq) * HEADS + head
    top = tl.load(stats + at * 2, mask=written, other=float("-inf"))
    weight = tl.load(stats + at * 2 + 1, mask=written, other=0.0)
    element = written[:, None] & (d < DIM)[None, :]
    total = tl.load(parts + at[:, None] * DIM + d[None, :], mask=element, other=0.0)
    share = tl.exp2(top - tl.max(top, 0))
    mean = tl.sum(total * share[:, None], 0) / tl.sum(weight * share, 0)
    tl.store(out + (start.to(tl.int64) * HEADS + head) * DIM + d, mean, mask=d < DIM)
