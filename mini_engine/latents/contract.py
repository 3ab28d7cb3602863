"""Lesson 16. Attention over latents: one contract, several kernels.

    out = latent_attention(q, q_rope, c_cache, r_cache, batch, scale)

    q         [T, H, rank]                           queries that have absorbed W_UK: they meet latents themselves
    q_rope    [T, H, rope]                           the part of the queries with RoPE
    c_cache   [num_blocks, block_size, 1, rank]      latents: part of every head's key, and all of every head's value
    r_cache   [num_blocks, block_size, 1, rope]      rotary keys: the other part of every head's key
    out       [T, H, rank]                           a weighted sum of latents for each head, in q's dtype

Scores are scale * (q · c + q_rope · r). Everything else is lesson 3's contract (`mini_engine.attention.contract`):
batches, causality, padding, and the slots that are never read. It is multi-query attention (Shazeer, 2019,
arXiv:1911.02150) whose values are part of its keys, so a kernel reads a latent once for all heads, and once for both
scores and sums.

Caches may hold rows of bytes in place of vectors (lesson 17): `[num_blocks, block_size, 1, bytes of a row]`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mini_engine.attention.contract import Batch, Kernel, check_batch

Widen = Callable[[Tensor, int, torch.dtype], Tensor]


def as_it_is(rows: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return the rows of a cache of vectors, which are the vectors, in this dtype."""
    return rows.to(dtype)


@dataclass(frozen=True)
class LatentKernel(Kernel):
    """A kernel with the contract above, ready to run: calling it checks the inputs, then runs `paged_attention`.

    widen: turns rows of a cache into vectors `[…, dim]` of a dtype (lesson 17).
    row_of: returns the size of a cache row for a vector's width. cached: the caches' dtype; None: the queries'.
    absorbed, expanded: a faster `reading.absorbed_attention`, and `expanded_attention`; None if there is none.
    """

    widen: Widen = as_it_is
    row_of: Callable[[int], int] = int
    cached: torch.dtype | None = None
    absorbed: Callable[..., Tensor] | None = None
    expanded: Callable[..., Tensor] | None = None

    def __call__(
        self, q: Tensor, q_rope: Tensor, c_cache: Tensor, r_cache: Tensor, batch: Batch, scale: float
    ) -> Tensor:
        check_latents(q, q_rope, c_cache, r_cache, self.row_of, self.cached or q.dtype)
        check_batch(q, c_cache, r_cache, batch)
        return self.paged_attention(q, q_rope, c_cache, r_cache, batch, scale)


def check_latents(
    q: Tensor, q_rope: Tensor, c_cache: Tensor, r_cache: Tensor, row_of: Callable[[int], int], cached: torch.dtype
) -> None:
    """Raise ValueError unless queries and caches fit. It names the argument, its value and what is allowed."""
    if q.dim() != 3 or q_rope.dim() != 3 or q.shape[:2] != q_rope.shape[:2] or q.dtype != q_rope.dtype:
        raise ValueError(
            f"q is {q.dtype} {list(q.shape)} and q_rope {q_rope.dtype} {list(q_rope.shape)}; they are [T, H, rank] and "
            "[T, H, rope] of one dtype"
        )
    for name, cache, part in (("c_cache", c_cache, q), ("r_cache", r_cache, q_rope)):
        row = row_of(part.shape[2])
        if cache.dim() != 4 or cache.shape[2:] != (1, row) or cache.dtype != cached:
            raise ValueError(
                f"{name} is {cache.dtype} {list(cache.shape)}; for queries of {part.shape[2]} numbers it is {cached} "
                f"[num_blocks, block_size, 1, {row}]"
            )
        if not cache.is_contiguous():
            raise ValueError(f"{name} must be contiguous; pass one layer's tensor as it was allocated")
    if c_cache.shape[:2] != r_cache.shape[:2]:
        raise ValueError(
            f"c_cache has blocks {list(c_cache.shape[:2])}, r_cache {list(r_cache.shape[:2])}; use one size"
        )
