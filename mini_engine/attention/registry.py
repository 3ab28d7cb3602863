"""Lesson 3. The attention kernels by name, and the choice of the fastest one that works here.

Not every machine has a C++ compiler or Triton, so kernels that need them are built and imported only on request.
"""

import functools
import sys
from dataclasses import replace
from importlib import import_module

import torch

from mini_engine.attention.contract import EVERY_KEY, Kernel, Wanted
from mini_engine.base.errors import UserError
from mini_engine.base.values import shown

KERNEL_NAMES = ("auto", "reference", "blockwise", "torch", "cpu", "triton")
# The modules whose LOADERS have the kernels for a kind of cache, imported on request.
MODULES = {
    "keys and values": "mini_engine.attention.plain",
    "keys and values in a window": "mini_engine.windows.kernels",
    "latents": "mini_engine.latents.kernels",
    "rows of keys and values": "mini_engine.quantized.kernels",
    "rows of keys and values in a window": "mini_engine.quantized.windows",
    "rows of latents": "mini_engine.quantized.latents",
}


def load_kernel(
    name: str = "auto",
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    rows: str | None = None,
    window: int = EVERY_KEY,
    latents: bool = False,
) -> Kernel:
    """Return the kernel with this name, for queries of this dtype on this device.

    reference runs everywhere and is the specification; blockwise runs everywhere and reads the cache in place; torch
    runs everywhere, faster; cpu is C++, compiled on first use; triton is for GPUs. auto picks the fastest that works
    and says on stderr when it has to settle for less.

    Args:
        rows: the format of the cache's rows; None if it holds numbers of this dtype.
        window: the number of keys that a query sees, its own included.
        latents: True if the cache holds latents instead of keys and values.

    Raises:
        UserError: there is no such kernel, or it cannot work here; the message says why.
    """
    if window < 1:
        raise ValueError(f"the window is {window} keys; use 1 or more, since a query sees at least its own")
    wanted = Wanted(name, torch.device(device), dtype, rows, window, latents)
    if name == "auto":
        return _best_kernel(wanted)
    loaders = import_module(MODULES[wanted.cache]).LOADERS if wanted.cache in MODULES else {}
    if name not in loaders:
        reads = " ".join(filter(None, (rows, wanted.cache)))
        raise UserError(
            f"no attention kernel {shown(name)} reads {reads}; choose one of {', '.join(('auto', *loaders))}",
            param="kernel",
        )
    if name == "cpu" and wanted.device.type != "cpu":
        raise UserError(f"the cpu kernel runs on the CPU, not on {device}; choose another one of {', '.join(loaders)}")
    return replace(loaders[name](wanted), wanted=wanted)


def windowed(kernel: Kernel, window: int) -> Kernel:
    """Return the same kernel for queries that see the last `window` keys, their own included.

    Its table may have holes: an entry before the windows of all of a sequence's queries is never followed.

    Raises:
        UserError: this kernel has no such form.
    """
    if kernel.wanted is None:
        raise UserError(f"the attention kernel {shown(kernel.name)} has no windowed form; use one of `load_kernel`")
    return load_kernel(*kernel.wanted._replace(window=window))


def _best_kernel(wanted: Wanted) -> Kernel:
    """Return the fastest kernel for this device. If it cannot work here, return torch's, and say so on stderr."""
    try:
        return load_kernel(*wanted._replace(name={"cpu": "cpu", "cuda": "triton"}.get(wanted.device.type, "torch")))
    except UserError as why:
        _say_once(f"attention: {why}. Using the torch kernel: the same tokens, several times slower in decode.")
        return load_kernel(*wanted._replace(name="torch"))


@functools.cache
def _say_once(notice: str) -> None:
    sys.stderr.write(f"{notice}\n")
