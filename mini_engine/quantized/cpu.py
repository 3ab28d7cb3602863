"""Lesson 17. The C++ kernels for rows: lesson 3's with another way to load keys and values.

int8_cpu.cpp and int4_cpu.cpp have a function for each dtype of the queries; each file is compiled on first use.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mini_engine.attention.contract import EVERY_KEY, PagedAttention
from mini_engine.attention.cpu import HEADERS, call, open_library
from mini_engine.errors import UserError
from mini_engine.native_build import find_or_build

HERE = Path(__file__).parent
SOURCES = {
    "int8": (HERE / "int8_cpu.cpp", *HEADERS),
    "int4": (HERE / "int4_cpu.cpp", HERE / "int4_rows.h", *HEADERS),
}
SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}


def load(device: torch.device, dtype: torch.dtype, rows: str) -> PagedAttention:
    """Return the C++ kernel for queries of this dtype over rows of the named format, built first if necessary.

    Raises:
        UserError: the device is not a CPU, the dtype is not supported, or the kernel cannot be built here.
    """
    if device.type != "cpu":
        raise UserError(f"the cpu kernel runs on the CPU, not on {device}; ask for triton or torch")
    function_for(rows, dtype)
    return functools.partial(paged_attention, rows=rows)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_kv: Tensor,
    block_table: Tensor,
    scale: float,
    window: int = EVERY_KEY,
    *,
    rows: str,
) -> Tensor:
    """Implement the contract for caches of these rows; q's dtype selects the function."""
    tables = cu_seqlens_q, seq_lens_kv, block_table
    return call(function_for(rows, q.dtype), q, k_cache, v_cache, *tables, scale, window)


def name_of(rows: str, dtype: torch.dtype) -> str:
    """Return the name of the compiled function for these rows and queries of this dtype."""
    return f"paged_attention_{rows}_{SUFFIXES[dtype]}"


def function_for(rows: str, dtype: torch.dtype) -> Callable[..., int]:
    """Return the compiled function for these rows and queries of this dtype; UserError if there is none."""
    if dtype not in SUFFIXES:
        raise UserError(f"the cpu kernel takes float32 and bfloat16, not {dtype}; ask for torch")
    library = _library(rows)
    if isinstance(library, UserError):
        raise UserError(str(library))
    return getattr(library, name_of(rows, dtype))


@functools.cache
def _library(rows: str) -> ctypes.CDLL | UserError:
    """Return the compiled kernel, or the error of its build: a process does not repeat a failed build."""
    names = [name_of(rows, dtype) for dtype in SUFFIXES]
    try:
        return find_or_build(SOURCES[rows], lambda path: open_library(path, names))
    except UserError as why:
        return why
