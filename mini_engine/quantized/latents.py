"""Lesson 17. Kernels that read lesson 16's latents as rows, by their names.

A latent and a rotary key are a row each. With a rotation, both parts of a query are rotated first, and the result, a
weighted sum of rotated latents, is rotated back; keys and values are expanded from vectors that were rotated back.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from mini_engine.attention.registry import best_kernel
from mini_engine.errors import UserError
from mini_engine.latents.contract import LatentKernel, LatentPagedAttention
from mini_engine.latents.cpu import ATTENTION, LATENT_HEADERS, call
from mini_engine.latents.kernels import IN_TORCH
from mini_engine.native_build import Library
from mini_engine.quantized.formats import FORMATS, INT8, RowFormat
from mini_engine.values import shown

HERE = Path(__file__).parent
LIBRARY = Library(
    (HERE / "latent_rows_cpu.cpp", HERE / "int4_rows.h", *LATENT_HEADERS),
    {f"latent_attention_{rows}": ATTENTION for rows in FORMATS},
)


def load_kernel(
    name: str = "auto",
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    rows: RowFormat = INT8,
) -> LatentKernel:
    """Return lesson 16's kernel with this name, for queries of this dtype on this device, over rows of this format.

    Raises:
        UserError: there is no such kernel, or it cannot work here; the message says why.
    """
    device = torch.device(device)
    if name == "auto":
        return best_kernel(lambda name: load_kernel(name, device, dtype, rows), device)
    if name not in (*IN_TORCH, "cpu"):
        raise UserError(
            f"no attention kernel {shown(name)} reads {rows.name} rows of latents; choose one of auto, "
            f"{', '.join(IN_TORCH)}, cpu",
            param="kernel",
        )
    if name == "cpu":
        attend = load_cpp(device, dtype, rows.name)
    else:
        attend = cast(LatentPagedAttention, partial(IN_TORCH[name], widen=rows.unpack))
    attend = cast(LatentPagedAttention, partial(rotated, attend, rows))
    return LatentKernel(f"{rows.name} latents {name}", attend, rows.read, rows.row_bytes, rows.dtype)


def rotated(
    attend: LatentPagedAttention,
    rows: RowFormat,
    q: Tensor,
    q_rope: Tensor,
    c_cache: Tensor,
    r_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_kv: Tensor,
    block_table: Tensor,
    scale: float,
) -> Tensor:
    """Implement the contract with a kernel whose queries are rotated like the rows."""
    tables = cu_seqlens_q, seq_lens_kv, block_table
    return rows.rotate(attend(rows.rotate(q), rows.rotate(q_rope), c_cache, r_cache, *tables, scale))


def load_cpp(device: torch.device, dtype: torch.dtype, rows: str) -> LatentPagedAttention:
    """Return the C++ kernel for queries of this dtype over the rows with this name; UserError as in lesson 16."""
    if device.type != "cpu":
        raise UserError(f"the cpu kernel runs on the CPU, not on {device}; ask for torch")
    function_for(rows, dtype)
    return cast(LatentPagedAttention, partial(latent_attention, rows))


def latent_attention(
    rows: str,
    q: Tensor,
    q_rope: Tensor,
    c_cache: Tensor,
    r_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_kv: Tensor,
    block_table: Tensor,
    scale: float,
) -> Tensor:
    """Implement the contract; q's dtype selects the function."""
    tensors = q, q_rope, c_cache, r_cache, cu_seqlens_q, seq_lens_kv, block_table
    return call(function_for(rows, q.dtype), *tensors, scale)


def function_for(rows: str, dtype: torch.dtype) -> Callable[..., int]:
    """Return the compiled function for these rows and queries of this dtype; UserError if there is none."""
    return LIBRARY.function(f"latent_attention_{rows}", dtype)
