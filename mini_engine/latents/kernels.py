"""Lesson 16. Loads the kernels that read latents."""

from mini_engine.attention.contract import Wanted
from mini_engine.latents import attention, cpu
from mini_engine.latents.absorb import absorbed_attention
from mini_engine.latents.contract import LatentKernel
from mini_engine.latents.expand import expanded_attention


def load_cpu(wanted: Wanted) -> LatentKernel:
    """Return the C++ kernel, built first if necessary; UserError if it cannot be built or the dtype is another."""
    cpu.LIBRARY.function("latent_attention", wanted.dtype)
    return LatentKernel(
        wanted.title,
        cpu.latent_attention,
        native=cpu.native,
        absorbed=absorbed_attention,
        expanded=expanded_attention,
    )


LOADERS = {
    "reference": lambda wanted: LatentKernel(wanted.title, attention.reference_attention),
    "blockwise": lambda wanted: LatentKernel(wanted.title, attention.paged_attention),
    "torch": lambda wanted: LatentKernel(wanted.title, attention.batched_attention),
    "cpu": load_cpu,
}
