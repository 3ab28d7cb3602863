"""Lesson 12. The attention kernels that read int8 rows, by the names of lesson 3's.

Each takes lesson 3's arguments, with caches `[num_blocks, block_size, H_kv, row_bytes(D)]` of int8. None makes a copy
of the pool in full precision: reference and torch widen the rows that they gather, cpu and triton those they hold in
registers.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mini_engine.attention.contract import Kernel, PagedAttention, check_batch
from mini_engine.attention.dense import causal_attention
from mini_engine.attention.folded import CopyBuffer, FoldedAttention, Span
from mini_engine.attention.reference import gather
from mini_engine.attention.registry import best_kernel
from mini_engine.errors import UserError
from mini_engine.int8 import cpu
from mini_engine.int8.rows import row_bytes, unpack
from mini_engine.values import shown


class Int8Kernel(Kernel):
    """A kernel for caches of int8 rows. Calling it checks the inputs first, as in lesson 3."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens_kv: Tensor,
        block_table: Tensor,
        scale: float,
    ) -> Tensor:
        check_rows(q, k_cache, v_cache)
        check_batch(q, k_cache, v_cache, cu_seqlens_q, seq_lens_kv, block_table)
        return self.paged_attention(q, k_cache, v_cache, cu_seqlens_q, seq_lens_kv, block_table, scale)


def check_rows(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Raise ValueError unless the caches hold int8 rows that fit q."""
    if q.dim() != 3:
        raise ValueError(f"q is [T, H_q, D], got shape {list(q.shape)}")
    row = row_bytes(q.shape[2])
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype != torch.int8 or cache.dim() != 4 or cache.shape[3] != row or cache.shape != k_cache.shape:
            raise ValueError(
                f"{name} is {cache.dtype} {list(cache.shape)}; for heads of {q.shape[2]} both caches are torch.int8 "
                f"[num_blocks, block_size, H_kv, {row}]"
            )
        if not cache.is_contiguous():
            raise ValueError(f"{name} must be contiguous; pass one layer's tensor as it was allocated")
    if q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k_cache.shape[2]} key/value heads evenly")


def load_kernel(name: str = "auto", device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Kernel:
    """Return the kernel with this name, for queries of this dtype on this device.

    Names and errors are lesson 3's; blockwise reads no int8 rows.
    """
    device = torch.device(device)
    if name == "auto":
        return best_kernel(lambda name: load_kernel(name, device, dtype), device)
    loaders = {
        "reference": lambda: reference_attention,
        "torch": FoldedInt8Attention,
        "cpu": lambda: cpu.load(device, dtype),
        "triton": lambda: load_triton(device, dtype),
    }
    if name not in loaders:
        raise UserError(
            f"no attention kernel {shown(name)} reads int8 rows; choose one of auto, {', '.join(loaders)}",
            param="kernel",
        )
    return Int8Kernel(f"int8 {name}", loaders[name]())


def load_triton(device: torch.device, dtype: torch.dtype) -> PagedAttention:
    """Return the Triton kernel; UserError if Triton cannot be imported or cannot work here."""
    try:
        from mini_engine.int8 import triton_kernel
    except ImportError as error:
        raise UserError(f"the triton kernel needs Triton, which cannot be imported ({error})") from error
    return triton_kernel.load(device, dtype)


def reference_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_kv: Tensor,
    block_table: Tensor,
    scale: float,
) -> Tensor:
    """The specification: lesson 3's reference over the numbers that the rows stand for."""
    out = torch.zeros_like(q)
    for s, (begin, end) in enumerate(pairwise(cu_seqlens_q.tolist())):
        if begin == end:
            continue
        rows = (gather(cache, block_table[s], int(seq_lens_kv[s])) for cache in (k_cache, v_cache))
        k, v = (unpack(x, q.shape[2], q.dtype) for x in rows)
        out[begin:end] = causal_attention(q[begin:end], k, v, scale)
    return out


class FoldedInt8Attention(FoldedAttention):
    """Lesson 3's attention in torch alone; what it copies is widened on the way."""

    def __init__(self) -> None:
        self._buffer = self._rows = RowBuffer()

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens_kv: Tensor,
        block_table: Tensor,
        scale: float,
    ) -> Tensor:
        self._rows.dim, self._rows.dtype = q.shape[2], q.dtype
        return super().__call__(q, k_cache, v_cache, cu_seqlens_q, seq_lens_kv, block_table, scale)


class RowBuffer(CopyBuffer):
    """Copies of rows, widened to vectors of `dim` numbers of `dtype`."""

    dim: int
    dtype: torch.dtype

    def gather(
        self, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, spans: Sequence[Span]
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of these spans, unpacked: `[n, longest, H_kv, dim]` each, of `dtype`."""
        k, v = super().gather(k_cache, v_cache, block_table, spans)
        return unpack(k, self.dim, self.dtype), unpack(v, self.dim, self.dtype)
