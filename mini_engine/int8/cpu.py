"""Lesson 12. The C++ kernel for int8 rows, `int8_cpu.cpp`: lesson 3's with another way to load keys and values."""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from mini_engine.attention.contract import PagedAttention
from mini_engine.attention.cpu import HEADERS, call, open_library
from mini_engine.errors import UserError
from mini_engine.native_build import find_or_build

SOURCES = (Path(__file__).with_name("int8_cpu.cpp"), *HEADERS)
FUNCTIONS = {torch.float32: "paged_attention_int8_f32", torch.bfloat16: "paged_attention_int8_bf16"}


def load(device: torch.device, dtype: torch.dtype) -> PagedAttention:
    """Return the C++ kernel for queries of this dtype, built now if it never was.

    Raises:
        UserError: not a CPU, not a dtype it knows, or it cannot be built here.
    """
    if device.type != "cpu":
        raise UserError(f"the cpu kernel runs on the CPU, not on {device}; ask for triton or torch")
    function_for(dtype)
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
    """Attend as the contract says, to caches of int8 rows; q's dtype chooses the function."""
    return call(function_for(q.dtype), q, k_cache, v_cache, cu_seqlens_q, seq_lens_kv, block_table, scale)


def function_for(dtype: torch.dtype):
    """Return the compiled function for queries of this dtype; UserError if there is none."""
    if dtype not in FUNCTIONS:
        raise UserError(f"the cpu kernel takes float32 and bfloat16, not {dtype}; ask for torch")
    library = _library()
    if isinstance(library, UserError):
        raise UserError(str(library))
    return getattr(library, FUNCTIONS[dtype])


@functools.cache
def _library() -> ctypes.CDLL | UserError:
    """The compiled kernel, or why there is none: a failed build is not repeated in this process."""
    try:
        return find_or_build(SOURCES, lambda path: open_library(path, FUNCTIONS.values()))
    except UserError as why:
        return why
