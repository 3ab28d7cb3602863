"""Lesson 3. The reference paged-attention kernel, which gathers: the specification for the kernels that do not.

For one sequence at a time, it copies the keys and values through the block table, then attends as if they had been
contiguous all along.
"""

from itertools import pairwise

import torch
from torch import Tensor

from mini_engine.attention.contract import Batch
from mini_engine.attention.dense import causal_attention


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float) -> Tensor:
    """Implement the contract of `mini_engine.attention.contract` in plain torch, on any device.

    Query i of sequence s sees its keys 0 … kv_len - q_len + i. A sequence without queries is skipped, whatever its row
    of the table holds, and rows of q that belong to no sequence give zeros. `scale` multiplies q·k.

    Returns:
        `[T, H_q, D]` in q's dtype. The inputs are not changed.
    """
    out = torch.zeros_like(q)  # rows that belong to no sequence stay zero
    for s, (begin, end) in enumerate(pairwise(batch.cu_seqlens_q.tolist())):
        if begin == end:
            continue
        kv_len = int(batch.seq_lens_kv[s])
        k = gather(k_cache, batch.block_table[s], kv_len)
        v = gather(v_cache, batch.block_table[s], kv_len)
        out[begin:end] = causal_attention(q[begin:end], k, v, scale)
    return out


def gather(cache: Tensor, block_ids: Tensor, kv_len: int) -> Tensor:
    """Return a copy `[kv_len, H_kv, D]` of one sequence's rows, in order.

    Args:
        cache: `[num_blocks, block_size, H_kv, D]`.
        block_ids: `[max_blocks]`, the sequence's row of the block table; entries past the needed ones are not read.

    Raises:
        IndexError: a needed block is not in the cache. (`cache[block_ids]` would take -1 for the last block.)
    """
    needed = -(-kv_len // cache.shape[1])
    return cache.index_select(0, block_ids[:needed]).flatten(0, 1)[:kv_len]
