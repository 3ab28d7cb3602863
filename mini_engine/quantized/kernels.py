"""Lesson 17. The attention kernels that read rows, int8 or int4.

Each takes lesson 3's arguments, with caches `[num_blocks, block_size, H_kv, row_bytes(D)]` of bytes. None makes a copy
of the pool in full precision: reference and torch widen the rows that they gather, cpu and triton those they hold in
registers or in the L1 cache. Rows of rotated vectors are read as they are: the query is rotated first, and the result
is rotated back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import Tensor

from mini_engine.attention import plain
from mini_engine.attention.contract import Batch, Kernel, Wanted, check_batch
from mini_engine.quantized import cpu
from mini_engine.quantized.attention import FoldedRowAttention, reference_attention
from mini_engine.quantized.formats import FORMATS, RowFormat


@dataclass(frozen=True)
class RowKernel(Kernel):
    """A kernel for caches of rows. Calling it checks the inputs first, as in lesson 3.

    paged_attention: takes queries rotated like the rows. rows: the format of the caches.
    """

    rows: RowFormat

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float) -> Tensor:
        self.check(q, k_cache, v_cache, batch)
        return self.rows.rotate(self.paged_attention(self.rows.rotate(q), k_cache, v_cache, batch, scale))

    def check(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> None:
        """Raise ValueError unless the caches hold rows that fit q, and the batch fits both."""
        check_rows(q, k_cache, v_cache, self.rows)
        check_batch(q, k_cache, v_cache, batch)


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


def row_kernel(
    wanted: Wanted, attention_over: Callable[[RowFormat], Callable[..., Tensor]], **options: Any
) -> RowKernel:
    """Return the kernel whose function `attention_over` makes for a format; options are Kernel's."""
    rows = FORMATS[cast(str, wanted.rows)]
    return RowKernel(wanted.title, attention_over(rows), rows, **options)


def load_cpu(wanted: Wanted) -> RowKernel:
    """Return the C++ kernel, built first if necessary; UserError if it cannot be built or the dtype is another."""
    name = cast(str, wanted.rows)
    cpu.function_for(name, wanted.dtype)
    return row_kernel(wanted, lambda _: partial(cpu.paged_attention, rows=name), native=partial(cpu.native, name))


def load_triton(wanted: Wanted) -> RowKernel:
    """Return the Triton kernel; UserError if Triton cannot be imported, or cannot work here."""
    plain.load_triton(wanted)
    from mini_engine.quantized.triton_kernel import paged_attention

    return row_kernel(wanted, lambda rows: partial(paged_attention, rows=rows.name), recordable=True)


LOADERS = {
    "reference": lambda wanted: row_kernel(wanted, lambda rows: partial(reference_attention, rows=rows)),
    "torch": lambda wanted: row_kernel(wanted, FoldedRowAttention),
    "cpu": load_cpu,
    "triton": load_triton,
}
