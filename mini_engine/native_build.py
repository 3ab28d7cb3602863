"""Lesson 3. Builds a C++ source with the machine's own compiler, once, and keeps the library in the user's cache.

The sources know nothing of Python or torch: they take pointers and sizes, so any C++17 compiler builds them in seconds
and ctypes calls them. Nothing is compiled when the package is installed, so a machine without a compiler lacks only
these libraries.
"""

import contextlib
import ctypes
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

from mini_engine.errors import UserError

BASE_FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-Wno-psabi")
# Tried in this order: this processor's own instructions and threads first, then anything the compiler accepts.
FLAG_SETS = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",), ())


def find_or_build(
    sources: Sequence[Path],
    open_library: Callable[[Path], ctypes.CDLL],
    flag_sets: Sequence[Sequence[str]] = FLAG_SETS,
) -> ctypes.CDLL:
    """Return the compiled library, from the cache or built into it.

    Args:
        sources: the file to compile, followed by the files it includes.
        open_library: loads the library and declares its functions; OSError if the file is missing or damaged.
        flag_sets: compiler flags, tried in this order until a build works.

    Raises:
        UserError: there is no compiler, or it fails with every set of flags.
    """
    kept = cache_dir() / library_name(sources, flag_sets)
    with contextlib.suppress(OSError):  # never built, or damaged
        return open_library(kept)
    compiler = find_compiler()
    sys.stderr.write(f"{sources[0].parent.name}: compiling {sources[0].name}, once; this takes a few seconds\n")
    with _build_dir() as (folder, keep):
        library = _compile(compiler, sources[0], folder / kept.name, open_library, flag_sets)
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


def _compile(
    compiler: str,
    source: Path,
    target: Path,
    open_library: Callable[[Path], ctypes.CDLL],
    flag_sets: Sequence[Sequence[str]],
) -> ctypes.CDLL:
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
            return open_library(target)
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
