"""Lesson 15. Loads lesson 3's kernels with a window.

reference and blockwise are this lesson's own. cpu and triton take a window as one more argument. torch gathers first:
it gets only the blocks that are still visible, and masks the remaining keys before a window.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from mini_engine.attention import plain
from mini_engine.attention.contract import Batch, Kernel, Wanted
from mini_engine.attention.folded import QUERY_TILE, FoldedAttention
from mini_engine.windows import attention
from mini_engine.windows.window_table import first_visible


def takes_window(load: Callable[[Wanted], Kernel]) -> Callable[[Wanted], Kernel]:
    """Return a loader of the kernels that `load` returns, which take a window as one more argument."""

    def load_windowed(wanted: Wanted) -> Kernel:
        kernel = load(wanted)
        return replace(kernel, paged_attention=partial(kernel.paged_attention, window=wanted.window))

    return load_windowed


@dataclass(frozen=True)
class VisibleBlocks:
    """Calls a kernel that masks by the window, with a table that begins at each sequence's first visible block."""

    paged_attention: Callable[..., Tensor]
    window: int

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float) -> Tensor:
        return self.paged_attention(q, k_cache, v_cache, visible_batch(batch, k_cache.shape[1], self.window), scale)


def visible_batch(batch: Batch, block_size: int, window: int) -> Batch:
    """Return the batch without the blocks that no query sees.

    A row of the table then begins at the first visible block, and its number of keys is smaller by the keys before that
    block. A causal mask and a window count from the last key, so neither changes. In a long chunk, later queries see
    other blocks than earlier ones, so it is cut into sequences of QUERY_TILE queries. Sequences without queries are
    left out, and so are the columns at the end that nothing reads.
    """
    starts, kv_lens, rows, behind = [0], [], [], []
    bounds, table = pairwise(batch.cu_seqlens_q.tolist()), batch.block_table
    for s, ((begin, end), kv_len) in enumerate(zip(bounds, batch.seq_lens_kv.tolist(), strict=True)):
        most = end - begin if kv_len <= window else QUERY_TILE
        for stop in [*range(begin + most, end, most), end] if begin < end else ():
            kv_end = kv_len - (end - stop)
            skipped = first_visible(kv_end - (stop - starts[-1]), window) // block_size
            starts.append(stop)
            kv_lens.append(kv_end - skipped * block_size)
            rows.append(s)
            behind.append(skipped)
    width = -(-max(kv_lens, default=0) // block_size)
    index = torch.tensor([rows, behind], dtype=torch.long, device=table.device)[..., None]
    columns = (index[1] + torch.arange(width, device=table.device)).clamp_(max=table.shape[1] - 1)
    to_int32 = partial(torch.tensor, dtype=torch.int32)
    return Batch(to_int32(starts), to_int32(kv_lens), table[index[0], columns])


LOADERS = {
    "reference": lambda wanted: Kernel(wanted.title, partial(attention.reference_attention, window=wanted.window)),
    "blockwise": lambda wanted: Kernel(wanted.title, partial(attention.paged_attention, window=wanted.window)),
    "torch": lambda wanted: Kernel(wanted.title, VisibleBlocks(FoldedAttention(wanted.window), wanted.window)),
    "cpu": takes_window(plain.load_cpu),
    "triton": takes_window(plain.load_triton),
}
