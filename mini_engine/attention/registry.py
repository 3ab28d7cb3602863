"""Lesson 3. The attention kernels by name, and the choice of the fastest one that works here.

Not every machine has a C++ compiler or Triton, so kernels that need them are built and imported only on request.
"""

import functools
import sys
from collections.abc import Callable
from typing import TypeVar

import torch

from mini_engine.attention import blockwise, cpu, folded, reference
from mini_engine.attention.contract import Kernel, PagedAttention
from mini_engine.errors import UserError
from mini_engine.values import shown

Loaded = TypeVar("Loaded")  # a kernel, of any type
KERNEL_NAMES = ("auto", "reference", "blockwise", "torch", "cpu", "triton")


def load_kernel(name: str = "auto", device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Kernel:
    """Return the kernel with this name, for tensors of this dtype on this device.

    reference runs everywhere and is the specification; blockwise runs everywhere and reads K and V in place; torch runs
    everywhere, faster; cpu is C++, compiled on first use; triton is for GPUs. auto picks the fastest that works and
    says on stderr when it has to settle for less.

    Raises:
        UserError: there is no such kernel, or it cannot work here; the message says why.
    """
    device = torch.device(device)
    if name == "auto":
        return best_kernel(lambda name: load_kernel(name, device, dtype), device)
    if name == "reference":
        return Kernel("reference", reference.paged_attention)
    if name == "blockwise":
        return Kernel("blockwise", blockwise.paged_attention)
    if name == "torch":
        return Kernel("torch", folded.FoldedAttention())
    if name == "cpu":
        return Kernel("cpu", cpu.load(device, dtype))
    if name == "triton":
        return Kernel("triton", _load_triton(device, dtype))
    raise UserError(
        f"there is no attention kernel {shown(name)}; choose one of {', '.join(KERNEL_NAMES)}", param="kernel"
    )


def _load_triton(device: torch.device, dtype: torch.dtype) -> PagedAttention:
    try:
        from mini_engine.attention import triton_kernel
    except ImportError as error:
        raise UserError(f"the triton kernel needs Triton, which cannot be imported ({error})") from error
    return triton_kernel.load(device, dtype)


def best_kernel(load: Callable[[str], Loaded], device: torch.device) -> Loaded:
    """Return the fastest kernel that `load` can give for this device. If it falls back to torch, say so on stderr."""
    try:
        return load({"cpu": "cpu", "cuda": "triton"}.get(device.type, "torch"))
    except UserError as why:
        _say_once(f"attention: {why}. Using the torch kernel: the same tokens, several times slower in decode.")
        return load("torch")


@functools.cache
def _say_once(notice: str) -> None:
    sys.stderr.write(f"{notice}\n")
