"""Lesson 3. Paged attention block by block: follows the block table and reads keys and values in place, in plain torch.

This is the kernel that the lesson's page explains and its players show. However long the history, it holds one block's
scores and three running results: the online softmax (Milakov and Gimelshein, 2018), as in FlashAttention (Dao et al.,
2022).
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mini_engine.attention.contract import Batch


def ignore(*kept: Tensor) -> None:
    """Do nothing. The `watch` of a kernel that is not being recorded."""


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float) -> Tensor:
    """Implement the contract of `mini_engine.attention.contract` in plain torch, on any device.

    A sequence without queries is skipped, whatever its row of the table holds.

    Returns:
        `[T, H_q, D]` in q's dtype; rows of q that belong to no sequence give zeros. The inputs are not changed.
    """
    out = torch.zeros_like(q)
    for s, (begin, end) in enumerate(pairwise(batch.cu_seqlens_q.tolist())):
        if begin < end:
            blocks, kv_len = batch.block_table[s].tolist(), int(batch.seq_lens_kv[s])
            out[begin:end] = attend_blocks(q[begin:end], k_cache, v_cache, blocks, kv_len, scale)
    return out


def attend_blocks(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    blocks: Sequence[int],
    kv_len: int,
    scale: float,
    watch: Callable[[Tensor, Tensor, Tensor, Tensor], None] = ignore,
) -> Tensor:
    """Attend with one sequence's last q_len tokens to its kv_len keys, one block after another.

    Args:
        q: `[q_len, H_q, D]`. Query i sees keys 0 … kv_len - q_len + i; head h reads key/value head h // (H_q // H_kv).
        blocks: the sequence's row of the block table. Entries past the blocks of its kv_len keys may hold anything.
        watch: called after each block with its scores, the largest score so far, the sum of exp(score - largest) and
            the sum of exp(score - largest) · V, each `[q_len, H_kv, group, …]`. Players show them; no answer depends
            on it.

    Returns:
        `[q_len, H_q, D]` in float32.

    Raises:
        IndexError: a needed block is not in the cache.
    """
    block_size, kv_heads = k_cache.shape[1:3]
    q = q.float().unflatten(1, (kv_heads, -1)) * scale  # [q_len, H_kv, group, D]
    position = torch.arange(kv_len - len(q), kv_len, device=q.device)[:, None, None, None]  # of each query
    largest = q.new_full((*q.shape[:3], 1), -torch.inf)
    total, sums = torch.zeros_like(largest), torch.zeros_like(q)
    for start in range(0, kv_len, block_size):
        block = blocks[start // block_size]
        if block < 0:
            raise IndexError(f"block {block} is not in the cache; torch would take the last one")
        keys = torch.arange(start, min(start + block_size, kv_len), device=q.device)
        k, v = k_cache[block, : len(keys)].float(), v_cache[block, : len(keys)].float()  # [n, H_kv, D], in place
        scores = torch.einsum("qhgd,khd->qhgk", q, k)
        scores = scores.masked_fill(keys > position, -torch.inf)
        before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
        rescale, parts = (before - largest).exp(), (scores - largest).exp()
        total = total * rescale + parts.sum(-1, keepdim=True)
        sums = sums * rescale + torch.einsum("qhgk,khd->qhgd", parts, v)
        watch(scores, largest, total, sums)
    return (sums / total).flatten(1, 2)
