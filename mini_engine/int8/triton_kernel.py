"""Lesson 12. The Triton kernel for int8 rows: lesson 3's, with another way to load keys and values."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_engine.attention import triton_kernel as plain
from mini_engine.attention.contract import PagedAttention


def load(device: torch.device, dtype: torch.dtype) -> PagedAttention:
    """Return the kernel for queries of this dtype on this device; UserError as in lesson 3."""
    plain.load(device, dtype)
    return paged_attention


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_kv: Tensor,
    block_table: Tensor,
    scale: float,
) -> Tensor:
    """Attend as the contract says, to caches of int8 rows. Block ids are trusted: a check would wait."""
    return plain.launch(_load_int8, q, k_cache, v_cache, cu_seqlens_q, seq_lens_kv, block_table, scale)


@triton.jit
def _load_int8(cache, row, mask, d, DIM: tl.constexpr):
    """Rows of the cache as the numbers they stand for, `[KEYS, WIDTH]` float32; the scale is a row's last 4 bytes."""
    BYTES: tl.constexpr = (DIM + 3) // 4 * 4 + 4
    begin = cache + row * BYTES
    scale = tl.load((begin + (BYTES - 4)).to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
    values = tl.load(begin[:, None] + d[None, :], mask=mask[:, None] & (d < DIM)[None, :], other=0)
    return values.to(tl.float32) * scale[:, None]
