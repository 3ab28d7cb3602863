"""Lesson 16. The kernels that read latents, by the names of lesson 3's."""

import torch

from mini_engine.attention.registry import best_kernel
from mini_engine.errors import UserError
from mini_engine.latents import attention, cpu
from mini_engine.latents.contract import LatentKernel
from mini_engine.values import shown

IN_TORCH = {
    "reference": attention.reference_attention,
    "blockwise": attention.paged_attention,
    "torch": attention.batched_attention,
}


def load_kernel(
    name: str = "auto", device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> LatentKernel:
    """Return the kernel with this name, for queries of this dtype on this device.

    reference is the specification; blockwise reads latents in place; torch is faster for batches; cpu is C++, compiled
    on first use. auto picks the fastest that works and says on stderr when it has to settle for less.

    Raises:
        UserError: there is no such kernel, or it cannot work here; the message says why.
    """
    device = torch.device(device)
    if name == "auto":
        return best_kernel(lambda name: load_kernel(name, device, dtype), device)
    if name not in (*IN_TORCH, "cpu"):
        raise UserError(
            f"no attention kernel {shown(name)} reads latents; choose one of auto, {', '.join(IN_TORCH)}, cpu",
            param="kernel",
        )
    return LatentKernel(f"latents {name}", cpu.load(device, dtype) if name == "cpu" else IN_TORCH[name])
