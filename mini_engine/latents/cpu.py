"""Lesson 16. The C++ kernel over latents, `latent_cpu.cpp`, called by ctypes; it is compiled on first use."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mini_engine.attention.contract import Batch, Native, refuse_block
from mini_engine.attention.cpu import HEADERS
from mini_engine.attention.cpu import LIBRARY as PAGED
from mini_engine.base.native_build import Library, Signature

LATENT_HEADERS = (
    *(Path(__file__).with_name(name) for name in ("latent_cpu.h", "latent_tasks.h", "latent_tile.h")),
    *HEADERS,
)


class LatentSizes(ctypes.Structure):
    """The sizes of one call; `latent_cpu.h` has the same struct. Strides count elements."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("num_seqs", "num_rows", "heads", "rank", "rope"),
            *("num_blocks", "block_size", "max_blocks"),
            *("q_stride", "q_head_stride", "rope_stride", "rope_head_stride"),
        )
    )


ATTENTION = Signature((*[ctypes.c_void_p] * 8, ctypes.POINTER(LatentSizes), ctypes.c_float, ctypes.c_int))
LIBRARY = Library((Path(__file__).with_name("latent_cpu.cpp"), *LATENT_HEADERS), {"latent_attention": ATTENTION})


def latent_attention(q: Tensor, q_rope: Tensor, c_cache: Tensor, r_cache: Tensor, batch: Batch, scale: float) -> Tensor:
    """Implement the contract; q's dtype selects the function."""
    return call(LIBRARY.function("latent_attention", q.dtype), q, q_rope, c_cache, r_cache, batch, scale)


@functools.cache
def native(dtype: torch.dtype) -> Native:
    """Return the functions for caches of this dtype; a latent and a rotary key are a head each."""
    return Native(PAGED.address("write_slot", dtype), LIBRARY.address("latent_attention", dtype))


def call(
    function: Callable[..., int],
    q: Tensor,
    q_rope: Tensor,
    c_cache: Tensor,
    r_cache: Tensor,
    batch: Batch,
    scale: float,
) -> Tensor:
    """Call a compiled kernel that takes q's dtype and these caches; ValueError if a table names no block."""
    q, q_rope = (x if x.stride(2) == 1 else x.contiguous() for x in (q, q_rope))
    tables = [x.contiguous() for x in batch]
    out = torch.empty(q.shape, dtype=q.dtype)
    sizes = sizes_of(q, q_rope, c_cache, batch.block_table)
    pointers = [x.data_ptr() for x in (q, q_rope, c_cache, r_cache, out, *tables)]
    refuse_block(function(*pointers, sizes, scale, torch.get_num_threads()), len(c_cache))
    return out


def sizes_of(q: Tensor, q_rope: Tensor, c_cache: Tensor, block_table: Tensor) -> LatentSizes:
    """Return the sizes of a call with these tensors."""
    num_rows, heads, rank = q.shape
    num_blocks, block_size = c_cache.shape[:2]
    num_seqs, max_blocks = block_table.shape
    return LatentSizes(
        num_seqs=num_seqs,
        num_rows=num_rows,
        heads=heads,
        rank=rank,
        rope=q_rope.shape[2],
        num_blocks=num_blocks,
        block_size=block_size,
        max_blocks=max_blocks,
        q_stride=q.stride(0),
        q_head_stride=q.stride(1),
        rope_stride=q_rope.stride(0),
        rope_head_stride=q_rope.stride(1),
    )
