"""Lesson 17. Attention over rows in torch: the specification, and lesson 3's folded attention.

Both gather rows and widen only those; neither makes a copy of the pool in full precision. Queries must be rotated like
the rows.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mini_engine.attention.contract import EVERY_KEY, Batch
from mini_engine.attention.dense import causal_attention
from mini_engine.attention.folded import CopyBuffer, FoldedAttention, Span
from mini_engine.attention.reference import gather
from mini_engine.quantized.formats import RowFormat


def reference_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    scale: float,
    *,
    rows: RowFormat,
    attend: Callable[[Tensor, Tensor, Tensor, float], Tensor] = causal_attention,
) -> Tensor:
    """Run the specification: lesson 3's reference over the numbers that the rows encode. `attend` masks them."""
    out = torch.zeros_like(q)
    for s, (begin, end) in enumerate(pairwise(batch.cu_seqlens_q.tolist())):
        if begin == end:
            continue
        gathered = (gather(cache, batch.block_table[s], int(batch.seq_lens_kv[s])) for cache in (k_cache, v_cache))
        k, v = (rows.unpack(x, q.shape[2], q.dtype) for x in gathered)
        out[begin:end] = attend(q[begin:end], k, v, scale)
    return out


class FoldedRowAttention(FoldedAttention):
    """Lesson 3's attention in torch alone; rows are widened as they are copied."""

    def __init__(self, rows: RowFormat, window: int = EVERY_KEY) -> None:
        super().__init__(window)
        self._buffer = self._copies = RowBuffer(rows)

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float) -> Tensor:
        self._copies.dim, self._copies.dtype = q.shape[2], q.dtype
        return super().__call__(q, k_cache, v_cache, batch, scale)


class RowBuffer(CopyBuffer):
    """Copies of rows, widened to vectors of `dim` numbers of `dtype`."""

    dim: int
    dtype: torch.dtype

    def __init__(self, rows: RowFormat) -> None:
        super().__init__()
        self._rows = rows

    def gather(
        self, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, spans: Sequence[Span]
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of these spans, unpacked: `[n, longest, H_kv, dim]` each, of `dtype`."""
        k, v = super().gather(k_cache, v_cache, block_table, spans)
        return self._rows.unpack(k, self.dim, self.dtype), self._rows.unpack(v, self.dim, self.dtype)
