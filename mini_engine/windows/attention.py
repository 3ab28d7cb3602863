"""Lesson 15. Paged attention with a window, in plain torch: the specification, and lesson 3's walk over the blocks.

The query at position i sees key j if i - window < j <= i: the last `window` keys, its own included. Everything else is
lesson 3's contract (`mini_engine.attention.contract`), with one more guarantee: a block that lies wholly before the
windows of a sequence's queries is never read, and its table entry never followed. It may be 0, -1 or another request's.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mini_engine.attention.blockwise import ignore
from mini_engine.attention.contract import Batch
from mini_engine.attention.folded import attend_window
from mini_engine.attention.reference import gather
from mini_engine.windows.window_table import first_visible


def reference_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float, window: int) -> Tensor:
    """Attend with a copy of the blocks that a sequence's queries can see, as if they were the whole history.

    Returns:
        `[T, H_q, D]` in q's dtype; rows of q that belong to no sequence give zeros. The inputs are not changed.
    """
    out, block_size = torch.zeros_like(q), k_cache.shape[1]
    for s, (begin, end) in enumerate(pairwise(batch.cu_seqlens_q.tolist())):
        if begin == end:
            continue
        kv_len = int(batch.seq_lens_kv[s])
        behind = first_visible(kv_len - (end - begin), window) // block_size  # whole blocks
        blocks, seen = batch.block_table[s, behind:], kv_len - behind * block_size
        k, v = (gather(cache, blocks, seen) for cache in (k_cache, v_cache))
        out[begin:end] = attend_window(q[begin:end], k, v, scale, window)
    return out


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float, window: int) -> Tensor:
    """Attend block by block, in place. A sequence without queries is skipped, whatever its row of the table holds.

    Returns:
        `[T, H_q, D]` in q's dtype; rows of q that belong to no sequence give zeros. The inputs are not changed.
    """
    out = torch.zeros_like(q)
    for s, (begin, end) in enumerate(pairwise(batch.cu_seqlens_q.tolist())):
        if begin < end:
            blocks, kv_len = batch.block_table[s].tolist(), int(batch.seq_lens_kv[s])
            out[begin:end] = attend_blocks(q[begin:end], k_cache, v_cache, blocks, kv_len, scale, window)
    return out


def attend_blocks(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    blocks: Sequence[int],
    kv_len: int,
    scale: float,
    window: int,
    watch: Callable[[Tensor, Tensor, Tensor, Tensor], None] = ignore,
) -> Tensor:
    """Attend with one sequence's last q_len tokens to the last `window` keys of each, one block after another.

    Args:
        q: `[q_len, H_q, D]`. Head h reads key/value head h // (H_q // H_kv).
        blocks: the sequence's row of the block table. The entries before the first visible key's block and those past
            the blocks of its kv_len keys may hold anything.
        window: keys that a query sees, its own included: token i sees key j if i - window < j <= i. A late query of a
            chunk may see none in the first blocks that are read for earlier ones.
        watch: called after each block that was read with its scores, the largest score so far, the sum of
            exp(score - largest) and the sum of exp(score - largest) · V, as in lesson 3. No answer depends on it.

    Returns:
        `[q_len, H_q, D]` in float32.

    Raises:
        IndexError: a needed block is not in the cache.
    """
    block_size, kv_heads = k_cache.shape[1:3]
    q = q.float().unflatten(1, (kv_heads, -1)) * scale  # [q_len, H_kv, group, D]
    position = torch.arange(kv_len - len(q), kv_len, device=q.device)[:, None, None, None]  # of each query
    # Not -inf: a late query of a chunk sees no key of the first blocks, and -inf - -inf would be NaN.
    largest = q.new_full((*q.shape[:3], 1), torch.finfo(q.dtype).min)
    total, sums = torch.zeros_like(largest), torch.zeros_like(q)
    first_block = first_visible(kv_len - len(q), window) // block_size
    for start in range(first_block * block_size, kv_len, block_size):
        block = blocks[start // block_size]
        if block < 0:
            raise IndexError(f"block {block} is not in the cache; torch would take the last one")
        keys = torch.arange(start, min(start + block_size, kv_len), device=q.device)
        k, v = k_cache[block, : len(keys)].float(), v_cache[block, : len(keys)].float()  # [n, H_kv, D], in place
        scores = torch.einsum("qhgd,khd->qhgk", q, k)
        scores = scores.masked_fill((keys > position) | (keys <= position - window), -torch.inf)
        before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
        rescale, parts = (before - largest).exp(), (scores - largest).exp()
        total = total * rescale + parts.sum(-1, keepdim=True)
        sums = sums * rescale + torch.einsum("qhgk,khd->qhgd", parts, v)
        watch(scores, largest, total, sums)
    return (sums / total).flatten(1, 2)
