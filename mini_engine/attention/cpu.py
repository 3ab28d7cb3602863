"""Lesson 3. The C++ kernel, `paged_cpu.cpp`, called by ctypes; it is compiled on first use."""

import ctypes
import functools
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from mini_engine.attention.contract import EVERY_KEY, PagedAttention
from mini_engine.errors import UserError
from mini_engine.native_build import find_or_build

HEADERS = tuple(
    Path(__file__).with_name(name) for name in ("paged_cpu.h", "runs.h", "scalar.h", "tasks.h", "tile.h", "vectors.h")
)
SOURCES = (Path(__file__).with_name("paged_cpu.cpp"), *HEADERS)
FUNCTIONS = {torch.float32: "paged_attention_f32", torch.bfloat16: "paged_attention_bf16"}
SCALAR_FUNCTIONS = {torch.float32: "paged_attention_scalar_f32", torch.bfloat16: "paged_attention_scalar_bf16"}


class AttentionSizes(ctypes.Structure):
    """The sizes of one call; `paged_cpu.h` has the same struct. Strides count elements, from one row to the next."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("num_seqs", "num_rows", "heads", "kv_heads", "dim"),
            *("num_blocks", "block_size", "max_blocks"),
            *("q_stride", "out_stride", "window"),
        )
    )


ARGUMENTS = (*[ctypes.c_void_p] * 7, ctypes.POINTER(AttentionSizes), ctypes.c_float, ctypes.c_int)


def load(device: torch.device, dtype: torch.dtype) -> PagedAttention:
    """Return the C++ kernel for tensors of this dtype, built first if necessary.

    Raises:
        UserError: the device is not a CPU, the dtype is not supported, or the kernel cannot be built here.
    """
    if device.type != "cpu":
        raise UserError(f"the cpu kernel runs on the CPU, not on {device}; ask for triton or torch")
    _library_for(dtype)
    return paged_attention


def kernel_address(dtype: torch.dtype) -> ctypes.c_void_p:
    """Return the address of the kernel's machine code, for C++ that calls it directly.

    Raises:
        UserError: the dtype is not supported, or the kernel cannot be built here.
    """
    return ctypes.cast(getattr(_library_for(dtype), FUNCTIONS[dtype]), ctypes.c_void_p)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_kv: Tensor,
    block_table: Tensor,
    scale: float,
    window: int = EVERY_KEY,
) -> Tensor:
    """Implement the contract. q's dtype selects the function: float32's would read past the end of bfloat16 data."""
    function = getattr(_library_for(q.dtype), FUNCTIONS[q.dtype])
    return call(function, q, k_cache, v_cache, cu_seqlens_q, seq_lens_kv, block_table, scale, window)


def scalar_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_kv: Tensor,
    block_table: Tensor,
    scale: float,
    window: int = EVERY_KEY,
) -> Tensor:
    """Implement the contract with `scalar.h`'s plain loops on one thread: a baseline to read, test and measure."""
    function = getattr(_library_for(q.dtype), SCALAR_FUNCTIONS[q.dtype])
    return call(function, q, k_cache, v_cache, cu_seqlens_q, seq_lens_kv, block_table, scale, window)


def call(
    function: Callable[..., int],
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_kv: Tensor,
    block_table: Tensor,
    scale: float,
    window: int = EVERY_KEY,
) -> Tensor:
    """Call a compiled PagedAttention that takes q's dtype and this cache; ValueError if a table names no block.

    Each query sees `window` keys, its own included; blocks that no query sees are not read, nor are their table
    entries.
    """
    if q.stride()[1:] != (q.shape[2], 1):
        q = q.contiguous()
    tables = [x.contiguous() for x in (cu_seqlens_q, seq_lens_kv, block_table)]
    out = q.new_empty(q.shape)
    sizes = sizes_of(q, out, k_cache, block_table, window)
    pointers = [x.data_ptr() for x in (q, k_cache, v_cache, out, *tables)]
    bad_seq = function(*pointers, sizes, scale, torch.get_num_threads())
    if bad_seq >= 0:
        raise ValueError(f"block_table row {bad_seq} names a block outside the cache's 0 … {len(k_cache) - 1}")
    return out


def spared_keys(
    q: Tensor, k_cache: Tensor, starts: Tensor, kv_lens: Tensor, table: Tensor, window: int = EVERY_KEY
) -> int:
    """Return the number of key reads that a call with these int32 tables saves because its decodes share blocks."""
    library = _library_for(q.dtype)
    library.paged_attention_spared.restype = ctypes.c_int64
    sizes = sizes_of(q, q, k_cache, table, window)
    return library.paged_attention_spared(
        *(ctypes.c_void_p(x.data_ptr()) for x in (starts, kv_lens, table)), ctypes.byref(sizes)
    )


def sizes_of(q: Tensor, out: Tensor, k_cache: Tensor, block_table: Tensor, window: int = EVERY_KEY) -> AttentionSizes:
    """Return the sizes of a call with these tensors. In `q` and `out`, the heads of a row are contiguous in memory."""
    num_rows, heads, dim = q.shape
    num_blocks, block_size, kv_heads, _ = k_cache.shape
    num_seqs, max_blocks = block_table.shape
    return AttentionSizes(
        num_seqs=num_seqs,
        num_rows=num_rows,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        num_blocks=num_blocks,
        block_size=block_size,
        max_blocks=max_blocks,
        q_stride=q.stride(0),
        out_stride=out.stride(0),
        window=window,
    )


def _library_for(dtype: torch.dtype) -> ctypes.CDLL:
    """Return the compiled kernel, after checking that it has a function for this dtype; UserError if not."""
    if dtype not in FUNCTIONS:
        raise UserError(f"the cpu kernel takes float32 and bfloat16, not {dtype}; ask for torch")
    library = _library()
    if isinstance(library, UserError):
        raise UserError(str(library))
    return library


@functools.cache
def _library() -> ctypes.CDLL | UserError:
    """Return the compiled kernel, or the error of its build: a process does not repeat a failed build."""
    try:
        return find_or_build(SOURCES, _open)
    except UserError as why:
        return why


def _open(path: Path) -> ctypes.CDLL:
    return open_library(path, (*FUNCTIONS.values(), *SCALAR_FUNCTIONS.values()))


def open_library(path: Path, names: Iterable[str]) -> ctypes.CDLL:
    """Load a compiled library and declare the PagedAttention functions with these names."""
    library = ctypes.CDLL(str(path))
    for name in names:
        getattr(library, name).argtypes = ARGUMENTS
    return library
