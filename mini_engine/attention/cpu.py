"""Lesson 3. The C++ kernel, `paged_cpu.cpp`, called by ctypes; it is compiled on first use."""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from mini_engine.attention.contract import PagedAttention
from mini_engine.errors import UserError
from mini_engine.native_build import find_or_build

SOURCES = tuple(Path(__file__).with_name(name) for name in ("paged_cpu.cpp", "tile.h", "vectors.h"))
FUNCTIONS = {torch.float32: "paged_attention_f32", torch.bfloat16: "paged_attention_bf16"}


def load(device: torch.device, dtype: torch.dtype) -> PagedAttention:
    """The C++ kernel for tensors of this dtype, built now if it never was.

    Raises:
        UserError: not a CPU, not a dtype it knows, or it cannot be built here.
    """
    if device.type != "cpu":
        raise UserError(f"the cpu kernel runs on the CPU, not on {device}; ask for triton or torch")
    c_function(dtype)
    return paged_attention


def c_function(dtype: torch.dtype) -> ctypes._CFuncPtr:
    """The kernel itself, for callers with pointers of their own (lesson 9).

    Raises:
        UserError: not a dtype it knows, or it cannot be built here.
    """
    if dtype not in FUNCTIONS:
        raise UserError(f"the cpu kernel takes float32 and bfloat16, not {dtype}; ask for torch")
    library = _library()
    if isinstance(library, UserError):
        raise UserError(str(library))
    return getattr(library, FUNCTIONS[dtype])


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_kv: Tensor,
    block_table: Tensor,
    scale: float,
) -> Tensor:
    """As the contract says. q's dtype chooses the function: one for float32 would read past the end of bfloat16."""
    function = c_function(q.dtype)
    num_rows, heads, dim = q.shape
    if q.stride()[1:] != (dim, 1):
        q = q.contiguous()
    tables = [x.contiguous() for x in (cu_seqlens_q, seq_lens_kv, block_table)]
    num_blocks, block_size, kv_heads, _ = k_cache.shape
    out = q.new_empty(q.shape)
    layout = (heads, kv_heads, dim, num_blocks, block_size, block_table.shape[1], q.stride(0), out.stride(0))
    size = (ctypes.c_int64 * 10)(len(seq_lens_kv), num_rows, *layout)
    pointers = [x.data_ptr() for x in (q, k_cache, v_cache, out, *tables)]
    foreign = function(*pointers, size, scale, torch.get_num_threads())
    if foreign >= 0:
        raise ValueError(f"block_table row {foreign} names a block outside the cache's 0 … {num_blocks - 1}")
    return out


@functools.cache
def _library() -> ctypes.CDLL | UserError:
    """The compiled kernel, or why there is none: a failed build is not repeated in this process."""
    try:
        return find_or_build(SOURCES, _open)
    except UserError as why:
        return why


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name in FUNCTIONS.values():
        pointers = [ctypes.c_void_p] * 7 + [ctypes.POINTER(ctypes.c_int64)]
        getattr(library, name).argtypes = [*pointers, ctypes.c_float, ctypes.c_int]
    return library
