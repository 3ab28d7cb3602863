"""Lesson 17. Kernels that read lesson 16's latents as rows.

A latent and a rotary key are a row each. With a rotation, both parts of a query are rotated first, and the result, a
weighted sum of rotated latents, is rotated back; keys and values are expanded from vectors that were rotated back.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from mini_engine.attention.contract import Batch, Wanted
from mini_engine.base.native_build import Library
from mini_engine.latents import attention
from mini_engine.latents.absorb import absorbed_attention
from mini_engine.latents.contract import LatentKernel
from mini_engine.latents.cpu import ATTENTION, LATENT_HEADERS, call
from mini_engine.latents.expand import expanded_attention
from mini_engine.quantized.formats import FORMATS, RowFormat

HERE = Path(__file__).parent
LIBRARY = Library(
    (HERE / "latent_rows_cpu.cpp", HERE / "int4_rows.h", *LATENT_HEADERS),
    {f"latent_attention_{rows}": ATTENTION for rows in FORMATS},
)


def rotated(
    attend: Callable[..., Tensor],
    rows: RowFormat,
    q: Tensor,
    q_rope: Tensor,
    c_cache: Tensor,
    r_cache: Tensor,
    batch: Batch,
    scale: float,
) -> Tensor:
    """Implement the contract with a kernel whose queries are rotated like the rows."""
    return rows.rotate(attend(rows.rotate(q), rows.rotate(q_rope), c_cache, r_cache, batch, scale))


def latent_attention(
    rows: str, q: Tensor, q_rope: Tensor, c_cache: Tensor, r_cache: Tensor, batch: Batch, scale: float
) -> Tensor:
    """Implement the contract; q's dtype selects the function."""
    return call(function_for(rows, q.dtype), q, q_rope, c_cache, r_cache, batch, scale)


def function_for(rows: str, dtype: torch.dtype) -> Callable[..., int]:
    """Return the compiled function for these rows and queries of this dtype; UserError if there is none."""
    return LIBRARY.function(f"latent_attention_{rows}", dtype)


def row_kernel(wanted: Wanted, attention_over: Callable[[RowFormat], Callable[..., Tensor]]) -> LatentKernel:
    """Return the kernel whose function `attention_over` makes for a format, with queries rotated like the rows."""
    rows = FORMATS[cast(str, wanted.rows)]
    attend = partial(rotated, attention_over(rows), rows)
    return LatentKernel(wanted.title, attend, rows.read, rows.row_bytes, rows.dtype)


def in_torch(attend: Callable[..., Tensor]) -> Callable[[Wanted], LatentKernel]:
    """Return a loader of one of lesson 16's kernels in torch, which widens rows as it reads them."""
    return lambda wanted: row_kernel(wanted, lambda rows: partial(attend, widen=rows.unpack))


def load_cpu(wanted: Wanted) -> LatentKernel:
    """Return the C++ kernel, built first if necessary; UserError if it cannot be built or the dtype is another."""
    function_for(cast(str, wanted.rows), wanted.dtype)
    kernel = row_kernel(wanted, lambda rows: partial(latent_attention, rows.name))
    return replace(kernel, absorbed=absorbed_attention, expanded=expanded_attention)


LOADERS = {
    "reference": in_torch(attention.reference_attention),
    "blockwise": in_torch(attention.paged_attention),
    "torch": in_torch(attention.batched_attention),
    "cpu": load_cpu,
}
