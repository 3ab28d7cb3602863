"""Lesson 16. Attention over latents in plain torch: the specification, one for batches, and a walk over blocks."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mini_engine.attention.contract import Batch
from mini_engine.attention.reference import gather
from mini_engine.kv.block_table import NULL_BLOCK
from mini_engine.latents.contract import Widen, as_it_is


def reference_attention(
    q: Tensor, q_rope: Tensor, c_cache: Tensor, r_cache: Tensor, batch: Batch, scale: float, widen: Widen = as_it_is
) -> Tensor:
    """Attend with a copy of each sequence's latents, as if they had been contiguous all along.

    Returns:
        `[T, H, rank]` in q's dtype; rows of q that belong to no sequence give zeros. The inputs are not changed.
    """
    out = torch.zeros_like(q)
    for s, (begin, end) in enumerate(pairwise(batch.cu_seqlens_q.tolist())):
        if begin == end:
            continue
        kv_len = int(batch.seq_lens_kv[s])
        c = widen(gather(c_cache, batch.block_table[s], kv_len), q.shape[2], q.dtype)[:, 0]
        r = widen(gather(r_cache, batch.block_table[s], kv_len), q_rope.shape[2], q.dtype)[:, 0]
        scores = torch.einsum("qhc,kc->qhk", q[begin:end], c) + torch.einsum("qhr,kr->qhk", q_rope[begin:end], r)
        weights = hide_later(scores.float() * scale, 0, kv_len).softmax(-1)
        out[begin:end] = torch.einsum("qhk,kc->qhc", weights.to(q.dtype), c)
    return out


def batched_attention(
    q: Tensor, q_rope: Tensor, c_cache: Tensor, r_cache: Tensor, batch: Batch, scale: float, widen: Widen = as_it_is
) -> Tensor:
    """Attend with all sequences of a decode step at once, over copies padded to the longest; otherwise as above."""
    starts = batch.cu_seqlens_q.tolist()
    if len(q) != len(batch.block_table) or starts != list(range(len(starts))):
        return reference_attention(q, q_rope, c_cache, r_cache, batch, scale, widen=widen)
    longest, block_size = int(batch.seq_lens_kv.max()), c_cache.shape[1]
    keys = torch.arange(longest, device=q.device)
    past = keys >= batch.seq_lens_kv[:, None]  # [S, longest]
    blocks = batch.block_table[:, keys // block_size].masked_fill(past, NULL_BLOCK)
    c, r = (
        widen(cache[blocks, keys % block_size], part.shape[2], q.dtype)[:, :, 0].masked_fill(past[..., None], 0.0)
        for cache, part in ((c_cache, q), (r_cache, q_rope))
    )
    scores = torch.einsum("shc,skc->shk", q, c) + torch.einsum("shr,skr->shk", q_rope, r)
    weights = (scores.float() * scale).masked_fill(past[:, None], -torch.inf).softmax(-1)
    return torch.einsum("shk,skc->shc", weights.to(q.dtype), c)


def paged_attention(
    q: Tensor, q_rope: Tensor, c_cache: Tensor, r_cache: Tensor, batch: Batch, scale: float, widen: Widen = as_it_is
) -> Tensor:
    """Attend block by block, in place. A sequence without queries is skipped, whatever its row of the table holds.

    Returns:
        `[T, H, rank]` in q's dtype; rows of q that belong to no sequence give zeros. The inputs are not changed.
    """
    out = torch.zeros_like(q)
    for s, (begin, end) in enumerate(pairwise(batch.cu_seqlens_q.tolist())):
        if begin < end:
            queries, kv_len = (q[begin:end], q_rope[begin:end]), int(batch.seq_lens_kv[s])
            blocks = batch.block_table[s].tolist()
            out[begin:end] = attend_blocks(*queries, c_cache, r_cache, blocks, kv_len, scale, widen)
    return out


def attend_blocks(
    q: Tensor,
    q_rope: Tensor,
    c_cache: Tensor,
    r_cache: Tensor,
    blocks: Sequence[int],
    kv_len: int,
    scale: float,
    widen: Widen = as_it_is,
) -> Tensor:
    """Attend with one sequence's last q_len tokens to its kv_len latents, one block after another (lesson 3's walk).

    Each block's latents are read once: all heads score them, scale * (q · c + q_rope · r), and then add them up as
    values. Scores and sums are in float32.

    Args:
        q, q_rope: `[q_len, H, rank]` and `[q_len, H, rope]`. Query i sees latents 0 … kv_len - q_len + i.
        blocks: the sequence's row of the block table. Entries past the blocks of its kv_len latents may hold anything.
        widen: turns rows `[n, 1, …]` of a cache into vectors `[n, 1, dim]` of a dtype: widen(rows, dim, torch.float32),
            once for each block. Caches may be in bfloat16, or hold bytes (lesson 17).

    Returns:
        `[q_len, H, rank]` in float32.

    Raises:
        IndexError: a needed block is not in the cache.
    """
    block_size, sums = c_cache.shape[1], RunningSums(q)
    q, q_rope = q.float() * scale, q_rope.float() * scale
    for start in range(0, kv_len, block_size):
        block = blocks[start // block_size]
        if block < 0:
            raise IndexError(f"block {block} is not in the cache; torch would take the last one")
        size = min(block_size, kv_len - start)
        c = widen(c_cache[block, :size], q.shape[2], torch.float32)[:, 0]  # [size, rank], for all heads
        r = widen(r_cache[block, :size], q_rope.shape[2], torch.float32)[:, 0]
        scores = hide_later(q @ c.T + q_rope @ r.T, start, kv_len)
        sums.add(scores, lambda weights, c=c: weights @ c)
    return sums.result()


def hide_later(scores: Tensor, start: int, kv_len: int) -> Tensor:
    """Return the scores `[q_len, H, n]` of keys start … start + n - 1, with keys after a query's own at -inf."""
    q_len, _, size = scores.shape
    position = torch.arange(kv_len - q_len, kv_len, device=scores.device)[:, None, None]  # of each query
    return scores.masked_fill(torch.arange(start, start + size, device=scores.device) > position, -torch.inf)


class RunningSums:
    """Softmax-weighted sums over keys that come in pieces (lesson 3's online softmax). The first piece holds key 0.

    Args:
        q: `[q_len, H, …]`, for its shape and its device.
    """

    def __init__(self, q: Tensor) -> None:
        self.largest = q.new_full((*q.shape[:2], 1), -torch.inf, dtype=torch.float32)
        self.total, self.sums = torch.zeros_like(self.largest), torch.zeros_like(self.largest)

    def add(self, scores: Tensor, weigh: Callable[[Tensor], Tensor]) -> None:
        """Add a piece with these scores `[q_len, H, n]`; `weigh` sums its values with weights of that shape."""
        before, self.largest = self.largest, torch.maximum(self.largest, scores.amax(-1, keepdim=True))
        rescale, weights = (before - self.largest).exp(), (scores - self.largest).exp()
        self.total = self.total * rescale + weights.sum(-1, keepdim=True)
        self.sums = self.sums * rescale + weigh(weights)

    def result(self) -> Tensor:
        """Return the sums `[q_len, H, width]` in float32, for weights that add up to 1."""
        return self.sums / self.total
