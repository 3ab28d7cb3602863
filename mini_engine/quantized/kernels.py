"""Lesson 17. The attention kernels that read rows, int8 or int4, by the names of lesson 3's.

Each takes lesson 3's arguments, with caches `[num_blocks, block_size, H_kv, row_bytes(D)]` of bytes. None makes a copy
of the pool in full precision: reference and torch widen the rows that they gather, cpu and triton those they hold in
registers or in the L1 cache. Rows of rotated vectors are read as they are: the query is rotated first, and the result
is rotated back.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from mini_engine.attention.contract import Kernel, PagedAttention, check_batch
from mini_engine.attention.registry import best_kernel
from mini_engine.errors import UserError
from mini_engine.quantized import cpu
from mini_engine.quantized.attention import FoldedRowAttention, reference_attention
from mini_engine.quantized.formats import INT8, RowFormat
from mini_engine.values import shown

NAMES = ("reference", "torch", "cpu", "triton")


@dataclass(frozen=True)
class RowKernel(Kernel):
    """A kernel for caches of rows. Calling it checks the inputs first, as in lesson 3.

    paged_attention: takes queries rotated like the rows. rows: the format of the caches.
    """

    rows: RowFormat

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
        check_rows(q, k_cache, v_cache, self.rows)
        check_batch(q, k_cache, v_cache, cu_seqlens_q, seq_lens_kv, block_table)
        tables = cu_seqlens_q, seq_lens_kv, block_table
        return self.rows.rotate(self.paged_attention(self.rows.rotate(q), k_cache, v_cache, *tables, scale))

    def with_window(self, window: int) -> Kernel:
        """Return the same kernel, for layers whose queries see the last `window` keys (lesson 15)."""
        from mini_engine.quantized.windows import with_window

        name = self.name.removeprefix(f"{self.rows.name} ")
        return replace(self, paged_attention=with_window(name, self.paged_attention, self.rows, window))


def check_rows(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: RowFormat) -> None:
    """Raise ValueError unless the caches hold rows of this format that fit q."""
    if q.dim() != 3:
        raise ValueError(f"q is [T, H_q, D], got shape {list(q.shape)}")
    row = rows.row_bytes(q.shape[2])
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype != rows.dtype or cache.dim() != 4 or cache.shape[3] != row or cache.shape != k_cache.shape:
            raise ValueError(
                f"{name} is {cache.dtype} {list(cache.shape)}; for heads of {q.shape[2]} both caches are {rows.dtype} "
                f"[num_blocks, block_size, H_kv, {row}]"
            )
        if not cache.is_contiguous():
            raise ValueError(f"{name} must be contiguous; pass one layer's tensor as it was allocated")
    if q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k_cache.shape[2]} key/value heads evenly")


def load_kernel(
    name: str = "auto",
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    rows: RowFormat = INT8,
) -> Kernel:
    """Return the kernel with this name, for queries of this dtype on this device, over rows of this format.

    Names and errors are lesson 3's; blockwise reads no rows.
    """
    device = torch.device(device)
    if name == "auto":
        return best_kernel(lambda name: load_kernel(name, device, dtype, rows), device)
    if name not in NAMES:
        raise UserError(
            f"no attention kernel {shown(name)} reads {rows.name} rows; choose one of auto, {', '.join(NAMES)}",
            param="kernel",
        )
    loaders = {
        "reference": lambda: cast(PagedAttention, partial(reference_attention, rows=rows)),
        "torch": lambda: FoldedRowAttention(rows),
        "cpu": lambda: cpu.load(device, dtype, rows.name),
        "triton": lambda: load_triton(device, dtype, rows),
    }
    return RowKernel(f"{rows.name} {name}", loaders[name](), rows)


def load_triton(device: torch.device, dtype: torch.dtype, rows: RowFormat) -> PagedAttention:
    """Return the Triton kernel; UserError if Triton cannot be imported or cannot work here."""
    try:
        from mini_engine.quantized import triton_kernel
    except ImportError as error:
        raise UserError(f"the triton kernel needs Triton, which cannot be imported ({error})") from error
    return triton_kernel.load(device, dtype, rows.name)
