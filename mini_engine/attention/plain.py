"""Lesson 3. Loads the kernels that read keys and values as they are."""

from mini_engine.attention import blockwise, cpu, folded, reference
from mini_engine.attention.contract import Kernel, Wanted
from mini_engine.base.errors import UserError


def load_cpu(wanted: Wanted) -> Kernel:
    """Return the C++ kernel, built first if necessary; UserError if it cannot be built or the dtype is another."""
    cpu.LIBRARY.function("paged_attention", wanted.dtype)
    return Kernel(wanted.title, cpu.paged_attention, native=cpu.native)


def load_triton(wanted: Wanted) -> Kernel:
    """Return the Triton kernel; UserError if Triton cannot be imported, or cannot work here."""
    try:
        from mini_engine.attention import triton_kernel
    except ImportError as error:
        raise UserError(f"the triton kernel needs Triton, which cannot be imported ({error})") from error
    triton_kernel.check_support(wanted.device, wanted.dtype)
    return Kernel(wanted.title, triton_kernel.paged_attention, recordable=True)


LOADERS = {
    "reference": lambda wanted: Kernel(wanted.title, reference.paged_attention),
    "blockwise": lambda wanted: Kernel(wanted.title, blockwise.paged_attention),
    "torch": lambda wanted: Kernel(wanted.title, folded.FoldedAttention()),
    "cpu": load_cpu,
    "triton": load_triton,
}
