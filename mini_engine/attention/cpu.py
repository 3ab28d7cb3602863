"""Lesson 3. The C++ kernel, `paged_cpu.cpp`: compiled when first asked for, kept in the user's cache directory.

The source knows nothing of Python or torch: it takes pointers and sizes, so any C++17 compiler builds it in seconds
and ctypes calls it. Lesson 9's C++ is built in the same way, by `find_or_build`.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mini_engine.attention.contract import PagedAttention
from mini_engine.errors import UserError

SOURCES = tuple(Path(__file__).with_name(name) for name in ("paged_cpu.cpp", "tile.h", "vectors.h"))
FUNCTIONS = {torch.float32: "paged_attention_f32", torch.bfloat16: "paged_attention_bf16"}
BASE_FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-Wno-psabi")
# Tried in this order: this processor's own instructions and threads first, then what can be had.
FLAG_SETS = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",), ())


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
    """The compiled kernel, or why there is none: a build that failed is not tried again in this process."""
    try:
        return find_or_build(SOURCES, _open)
    except UserError as why:
        return why


def find_or_build(
    sources: Sequence[Path],
    open_library: Callable[[Path], ctypes.CDLL],
    flag_sets: Sequence[Sequence[str]] = FLAG_SETS,
) -> ctypes.CDLL:
    """A compiled library, from the cache or built into it.

    Args:
        sources: the file to compile, then what it includes.
        open_library: loads it and says what its functions take; OSError if it is damaged.
        flag_sets: tried in this order.

    Raises:
        UserError: there is no compiler, or it fails with all of the flags.
    """
    kept = cache_dir() / library_name(sources, flag_sets)
    try:
        return open_library(kept)
    except OSError:  # never built, or damaged
        pass
    compiler = find_compiler()
    sys.stderr.write(f"{sources[0].parent.name}: compiling {sources[0].name}, once; this takes a few seconds\n")
    with _build_dir() as (folder, keep):
        library = _compile(compiler, sources[0], folder / kept.name, open_library, flag_sets)
        if keep:
            (folder / kept.name).replace(kept)  # whole or not at all, whoever else is building
        return library


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name in FUNCTIONS.values():
        pointers = [ctypes.c_void_p] * 7 + [ctypes.POINTER(ctypes.c_int64)]
        getattr(library, name).argtypes = [*pointers, ctypes.c_float, ctypes.c_int]
    return library


def _compile(
    compiler: str,
    source: Path,
    target: Path,
    open_library: Callable[[Path], ctypes.CDLL],
    flag_sets: Sequence[Sequence[str]],
) -> ctypes.CDLL:
    """Build with the first set of flags that gives a library which can be loaded."""
    for flags in flag_sets:
        command = [compiler, *BASE_FLAGS, *flags, str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
        if done.returncode == 0:
            with contextlib.suppress(OSError):
                return open_library(target)
    said = done.stderr.splitlines() or ["no reason given"]
    complaint = next((line for line in said if "error" in line), said[0])
    raise UserError(f"{source.name} does not compile with {compiler} ({complaint.strip()})")


def find_compiler() -> str:
    """The C++ compiler to use: $CXX if it is set, else the first of the usual names.

    On Windows none will do: g++ leaves wide vectors there where the stack happens to be (GCC's bug 54412), and Python
    does not find the libraries that g++ links to. In WSL, Linux on Windows, all of them will.

    Raises:
        UserError: there is none.
    """
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in wanted:
        if sys.platform != "win32" and (path := shutil.which(name)):
            return path
    where = " in WSL: what builds for Windows will not do" if sys.platform == "win32" else ""
    names = ", ".join(wanted)
    raise UserError(f"no C++ compiler was found (looked for {names}); the C++ kernel needs g++ or clang++{where}")


def cache_dir() -> Path:
    """Where compiled kernels are kept: $XDG_CACHE_HOME/mini_engine, by default ~/.cache/mini_engine."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mini_engine"


@contextlib.contextmanager
def _build_dir() -> Iterator[tuple[Path, bool]]:
    """A folder to build in, gone afterwards whatever happens, and whether its contents can be kept in the cache."""
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix="building-", dir=cache_dir())
        keep = True
    except OSError as error:
        sys.stderr.write(f"{cache_dir()} cannot be written ({error.strerror}); building for this run only\n")
        folder, keep = tempfile.TemporaryDirectory(prefix="mini_engine-"), False
    with folder as path:
        yield Path(path), keep


def library_name(sources: Sequence[Path] = SOURCES, flag_sets: Sequence[Sequence[str]] = FLAG_SETS) -> str:
    """Changes with the source, the flags, torch (whose OpenMP the kernel shares) and the processor it is built for."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    digest.update(repr((BASE_FLAGS, flag_sets, torch.__version__, platform.machine(), _processor())).encode())
    return f"{sources[0].stem}-{digest.hexdigest()[:16]}.so"


def _processor() -> str:
    """What this processor can do, as Linux tells it, or its name elsewhere."""
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return platform.processor()
