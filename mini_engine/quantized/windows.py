"""Lesson 17. Kernels over rows with lesson 15's window.

cpu and triton take a window as one more argument. reference and torch gather first: they get only the blocks that are
still visible, and mask the remaining keys before a window.
"""

from collections.abc import Callable
from functools import partial
from typing import cast

from torch import Tensor

from mini_engine.attention.contract import PagedAttention
from mini_engine.quantized.attention import FoldedRowAttention, reference_attention
from mini_engine.quantized.formats import RowFormat
from mini_engine.windows.attention import window_attention
from mini_engine.windows.kernels import VisibleBlocks


def with_window(name: str, paged_attention: PagedAttention, rows: RowFormat, window: int) -> PagedAttention:
    """Return `paged_attention`, the function of the kernel with this name over rows, with a window."""
    if name == "reference":
        attend = partial(window_attention, window=window)
        return VisibleBlocks(partial(reference_attention, rows=rows, attend=attend), window)
    if name == "torch":
        return VisibleBlocks(FoldedRowAttention(rows, window), window)
    return partial(cast(Callable[..., Tensor], paged_attention), window=window)
