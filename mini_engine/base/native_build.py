"""Lesson 3. Builds a C++ source with the machine's own compiler, once, and keeps the library in the user's cache.

The sources know nothing of Python or torch: they take pointers and sizes, so any C++17 compiler builds them in seconds
and ctypes calls them. Nothing is compiled when the package is installed, so a machine without a compiler lacks only
these libraries.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from mini_engine.base.errors import UserError

BASE_FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-Wno-psabi")
# Tried in this order: this processor's own instructions and threads first, then anything the compiler accepts.
FLAG_SETS = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",), ())


SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}  # of the functions' names


class Signature(NamedTuple):
    """A C function's types, as ctypes takes them. arguments: of its parameters. result: None for void."""

    arguments: Sequence[Any]
    result: Any = ctypes.c_int


@dataclass(frozen=True, eq=False)
class Library:
    """The functions of a C++ source, which is compiled when the first one is asked for.

    sources: the file to compile, followed by the files it includes.
    functions: each function's signature by its name. `name_f32` and `name_bf16` are the names in C++, or `name` alone.
    caller, instead: what takes float32 and bfloat16 only, and what to use for other dtypes; for error messages.
    flag_sets: compiler flags, tried in this order until a build works.
    """

    sources: Sequence[Path]
    functions: Mapping[str, Signature]
    caller: str = "the cpu kernel"
    instead: str = "ask for torch"
    flag_sets: Sequence[Sequence[str]] = FLAG_SETS

    def function(self, name: str, dtype: torch.dtype | None = None) -> Callable[..., Any]:
        """Return the function with this name for data of this dtype, or the one for any data.

        Raises:
            UserError: the dtype is not supported, or the library cannot be built here.
        """
        known = self._known.get((name, dtype))
        return known or self._known.setdefault((name, dtype), self._declare(name, dtype))

    def address(self, name: str, dtype: torch.dtype) -> ctypes.c_void_p:
        """Return the address of a function's machine code, for C++ that calls it; UserError as `function`."""
        return ctypes.cast(cast(Any, self.function(name, dtype)), ctypes.c_void_p)

    def load(self) -> ctypes.CDLL:
        """Return the library, built first if necessary; UserError if it cannot be built here."""
        if isinstance(self._built, UserError):
            raise UserError(str(self._built))
        return self._built

    @functools.cached_property
    def _known(self) -> dict[tuple[str, torch.dtype | None], Callable[..., Any]]:
        """The functions that have been asked for."""
        return {}

    def _declare(self, name: str, dtype: torch.dtype | None) -> Callable[..., Any]:
        if dtype is not None and dtype not in SUFFIXES:
            raise UserError(f"{self.caller} takes float32 and bfloat16, not {dtype}; {self.instead}")
        function = getattr(self.load(), name if dtype is None else f"{name}_{SUFFIXES[dtype]}")
        function.argtypes, function.restype = self.functions[name]
        return function

    @functools.cached_property
    def _built(self) -> ctypes.CDLL | UserError:
        """The compiled library, or the error of its build: a process does not repeat a failed build."""
        try:
            return find_or_build(self.sources, self.flag_sets)
        except UserError as why:
            return why


def find_or_build(sources: Sequence[Path], flag_sets: Sequence[Sequence[str]] = FLAG_SETS) -> ctypes.CDLL:
    """Return a library from the cache, or build it into the cache. Arguments are those of `Library`.

    Raises:
        UserError: there is no compiler, or it fails with every set of flags.
    """
    kept = cache_dir() / library_name(sources, flag_sets)
    with contextlib.suppress(OSError):  # never built, or damaged
        return ctypes.CDLL(str(kept))
    compiler = find_compiler()
    sys.stderr.write(f"{sources[0].parent.name}: compiling {sources[0].name}, once; this takes a few seconds\n")
    with _build_dir() as (folder, keep):
        library = _compile(compiler, sources[0], folder / kept.name, flag_sets)
        if keep:
            (folder / kept.name).replace(kept)  # atomic: another process sees a whole library or none
        return library


def find_compiler() -> str:
    """Return the C++ compiler to use: $CXX if it is set, otherwise the first of the usual names.

    None is used on Windows: g++ misaligns wide vectors on the stack there (GCC bug 54412), and Python does not find the
    libraries that g++ links to. All of them work in WSL, Linux on Windows.

    Raises:
        UserError: there is none.
    """
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in wanted:
        if sys.platform != "win32" and (path := shutil.which(name)):
            return path
    where = " in WSL; compilers that build for Windows do not work" if sys.platform == "win32" else ""
    names = ", ".join(wanted)
    raise UserError(f"no C++ compiler was found (looked for {names}); compiled code needs g++ or clang++{where}")


def cache_dir() -> Path:
    """Return the folder for compiled libraries: $XDG_CACHE_HOME/mini_engine, by default ~/.cache/mini_engine."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mini_engine"


def library_name(sources: Sequence[Path], flag_sets: Sequence[Sequence[str]] = FLAG_SETS) -> str:
    """Return a file name that changes with the sources, the flags, torch (whose OpenMP is shared) and the processor."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    digest.update(repr((BASE_FLAGS, flag_sets, torch.__version__, platform.machine(), _processor())).encode())
    return f"{sources[0].stem}-{digest.hexdigest()[:16]}.so"


def _compile(compiler: str, source: Path, target: Path, flag_sets: Sequence[Sequence[str]]) -> ctypes.CDLL:
    """Build with the first set of flags that yields a loadable library."""
    complaint = "no flags to try"
    for flags in flag_sets:
        command = [compiler, *BASE_FLAGS, *flags, str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
        if done.returncode:
            said = done.stderr.splitlines() or ["no reason given"]
            complaint = next((line for line in said if "error" in line), said[0]).strip()
            continue
        try:
            return ctypes.CDLL(str(target))
        except OSError as error:  # it builds, but a library that it links to is missing
            complaint = str(error)
    raise UserError(f"{source.name} cannot be built with {compiler} ({complaint})")


@contextlib.contextmanager
def _build_dir() -> Iterator[tuple[Path, bool]]:
    """Yield a build folder, which is always removed afterwards, and whether its contents can go into the cache."""
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix="building-", dir=cache_dir())
        keep = True
    except OSError as error:
        sys.stderr.write(f"{cache_dir()} cannot be written ({error.strerror}); building for this run only\n")
        folder, keep = tempfile.TemporaryDirectory(prefix="mini_engine-"), False
    with folder as path:
        yield Path(path), keep


def _processor() -> str:
    """Return this processor's features as Linux lists them, or its name on other systems."""
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return platform.processor()
