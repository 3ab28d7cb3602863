"""Lesson 3. The fastest paged attention that torch alone can do: no compiler, any device.

Three things set it apart from the reference. Each sequence is copied into the same buffer, so the copy is still in the
processor's cache when attention reads it. In decode the query heads of a group are folded into the query length, so
that their keys and values are read once for all of them. And a whole prompt needs no mask.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.attention.dense import causal_attention


class FoldedAttention:
    """The contract of `mini_engine.attention.contract`; an object, because it keeps its buffer between calls."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens_kv: Tensor,
        block_table: Tensor,
        scale: float,
    ) -> Tensor:
        out = torch.zeros_like(q)
        for s, (begin, end) in enumerate(pairwise(cu_seqlens_q.tolist())):
            if begin < end:
                k, v = self._gather(k_cache, v_cache, block_table[s], int(seq_lens_kv[s]))
                attend = _decode if end - begin == 1 else _prefill if end - begin == len(k) else causal_attention
                out[begin:end] = attend(q[begin:end], k, v, scale)
        return out

    def _gather(self, k_cache: Tensor, v_cache: Tensor, block_ids: Tensor, kv_len: int) -> list[Tensor]:
        """K and V of one sequence, `[kv_len, H_kv, D]` each, valid until the next call."""
        block_ids = block_ids[: -(-kv_len // k_cache.shape[1])]
        room = block_ids.numel() * k_cache[0].numel()
        if self._buffer.numel() < 2 * room or self._buffer.dtype != k_cache.dtype:
            self._buffer = k_cache.new_empty(2 * room)
        halves = (self._buffer[i * room : (i + 1) * room].view(-1, *k_cache.shape[1:]) for i in (0, 1))
        copies = (torch.index_select(x, 0, block_ids, out=y) for x, y in zip((k_cache, v_cache), halves, strict=True))
        return [x.flatten(0, 1)[:kv_len] for x in copies]


def _decode(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One query token sees every key, so the H_q // H_kv heads of a group can stand in as that many query tokens."""
    folded = q.reshape(1, k.shape[1], -1, q.shape[2])  # [1, H_kv, group, D]
    k, v = (x.transpose(0, 1)[None] for x in (k, v))
    return F.scaled_dot_product_attention(folded, k, v, scale=scale).view_as(q)


def _prefill(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q_len = kv_len: the mask is the triangle that `is_causal` stands for, and half the work can be left out."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)[0].transpose(0, 1)
