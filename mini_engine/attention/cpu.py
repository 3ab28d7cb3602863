"""Lesson 3. The C++ kernel, `paged_cpu.cpp`, called by ctypes; it is compiled on first use."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mini_engine.attention.contract import EVERY_KEY, Batch, Native, refuse_block
from mini_engine.base.native_build import Library, Signature

HEADERS = tuple(
    Path(__file__).with_name(name) for name in ("paged_cpu.h", "runs.h", "scalar.h", "tasks.h", "tile.h", "vectors.h")
)


class AttentionSizes(ctypes.Structure):
    """The sizes of one call; `paged_cpu.h` has the same struct. Strides count elements, from one row to the next."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("num_seqs", "num_rows", "heads", "kv_heads", "dim"),
            *("num_blocks", "block_size", "max_blocks"),
            *("q_stride", "out_stride", "window"),
        )
    )


ATTENTION = Signature((*[ctypes.c_void_p] * 7, ctypes.POINTER(AttentionSizes), ctypes.c_float, ctypes.c_int))
WRITE = Signature((ctypes.c_void_p, *[ctypes.c_int64] * 2, ctypes.c_void_p, ctypes.c_int64), None)
SPARED = Signature((*[ctypes.c_void_p] * 3, ctypes.POINTER(AttentionSizes)), ctypes.c_int64)
LIBRARY = Library(
    (Path(__file__).with_name("paged_cpu.cpp"), *HEADERS),
    {
        "paged_attention": ATTENTION,
        "paged_attention_scalar": ATTENTION,
        "paged_attention_spared": SPARED,
        "write_slot": WRITE,
    },
)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float, window: int = EVERY_KEY
) -> Tensor:
    """Implement the contract. q's dtype selects the function: float32's would read past the end of bfloat16 data."""
    function = LIBRARY.function("paged_attention", q.dtype)
    return call(function, q, k_cache, v_cache, batch, scale, window)


def scalar_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float, window: int = EVERY_KEY
) -> Tensor:
    """Implement the contract with `scalar.h`'s plain loops on one thread: a baseline to read, test and measure."""
    function = LIBRARY.function("paged_attention_scalar", q.dtype)
    return call(function, q, k_cache, v_cache, batch, scale, window)


@functools.cache
def native(dtype: torch.dtype) -> Native:
    """Return the functions for caches of this dtype."""
    return Native(LIBRARY.address("write_slot", dtype), LIBRARY.address("paged_attention", dtype))


def call(
    function: Callable[..., int],
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    scale: float,
    window: int = EVERY_KEY,
) -> Tensor:
    """Call a compiled kernel that takes q's dtype and this cache; ValueError if a table names no block.

    Each query sees `window` keys, its own included; blocks that no query sees are not read, nor are their table
    entries.
    """
    if q.stride()[1:] != (q.shape[2], 1):
        q = q.contiguous()
    tables = [x.contiguous() for x in batch]
    out = q.new_empty(q.shape)
    sizes = sizes_of(q, out, k_cache, batch.block_table, window)
    pointers = [x.data_ptr() for x in (q, k_cache, v_cache, out, *tables)]
    refuse_block(function(*pointers, sizes, scale, torch.get_num_threads()), len(k_cache))
    return out


def spared_keys(q: Tensor, k_cache: Tensor, batch: Batch, window: int = EVERY_KEY) -> int:
    """Return the number of key reads that a call with this batch saves because its decodes share blocks."""
    tables = [x.data_ptr() for x in batch]
    return LIBRARY.function("paged_attention_spared")(*tables, sizes_of(q, q, k_cache, batch.block_table, window))


def sizes_of(q: Tensor, out: Tensor, k_cache: Tensor, block_table: Tensor, window: int = EVERY_KEY) -> AttentionSizes:
    """Return the sizes of a call with these tensors. In `q` and `out`, the heads of a row are contiguous in memory."""
    num_rows, heads, dim = q.shape
    num_blocks, block_size, kv_heads, _ = k_cache.shape
    num_seqs, max_blocks = block_table.shape
    return AttentionSizes(
        num_seqs=num_seqs,
        num_rows=num_rows,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        num_blocks=num_blocks,
        block_size=block_size,
        max_blocks=max_blocks,
        q_stride=q.stride(0),
        out_stride=out.stride(0),
        window=window,
    )
