"""Lesson 17. Loads the kernels over rows with lesson 15's window.

cpu and triton take a window as one more argument. reference and torch gather first: they get only the blocks that are
still visible, and mask the remaining keys before a window.
"""

from functools import partial

from mini_engine.attention.contract import Wanted
from mini_engine.attention.folded import attend_window
from mini_engine.quantized.attention import FoldedRowAttention, reference_attention
from mini_engine.quantized.formats import RowFormat
from mini_engine.quantized.kernels import RowKernel, load_cpu, load_triton, row_kernel
from mini_engine.windows.kernels import VisibleBlocks, takes_window


def load_reference(wanted: Wanted) -> RowKernel:
    """Return the specification, over the blocks that are still visible."""

    def attention_over(rows: RowFormat) -> VisibleBlocks:
        attend = partial(attend_window, window=wanted.window)
        return VisibleBlocks(partial(reference_attention, rows=rows, attend=attend), wanted.window)

    return row_kernel(wanted, attention_over)


def load_torch(wanted: Wanted) -> RowKernel:
    """Return lesson 3's attention in torch alone, over the blocks that are still visible."""
    return row_kernel(wanted, lambda rows: VisibleBlocks(FoldedRowAttention(rows, wanted.window), wanted.window))


LOADERS = {
    "reference": load_reference,
    "torch": load_torch,
    "cpu": takes_window(load_cpu),
    "triton": takes_window(load_triton),
}
