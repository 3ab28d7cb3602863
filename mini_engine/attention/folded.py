"""Lesson 3. The fastest paged attention that torch alone can do: no compiler, any device.

Four things set it apart from the reference. Sequences are copied block by block into the same buffer, so the copy is
still in the processor's cache when attention reads it. Those of like length that decode are attended to together, as
many as that cache can hold. The query heads of a group are folded into the query length, so that their keys and values
are read once for all of them. And a whole prompt needs no mask.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.attention.dense import causal_attention

COPY_BYTES = 2**22  # K and V of sequences attended to together; a longer one goes alone
UNLIKE = 64  # keys: more are not filled up with emptiness to spare a call


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
        out, decodes, kv_lens = torch.zeros_like(q), [], seq_lens_kv.tolist()
        for s, (begin, end) in enumerate(pairwise(cu_seqlens_q.tolist())):
            if end - begin == 1:
                decodes.append((kv_lens[s], s, begin))
            elif begin < end:
                k, v = self._gather(k_cache, v_cache, block_table[s : s + 1], kv_lens[s : s + 1])
                attend = _prefill if end - begin == kv_lens[s] else causal_attention
                out[begin:end] = attend(q[begin:end], k[0], v[0], scale)
        for group in _of_like_length(decodes, COPY_BYTES // (2 * k_cache[0, 0].nbytes)):
            lens, *places = zip(*group, strict=True)
            seqs, rows = map(_slice_or_list, places)
            out[rows] = _decode(q[rows], *self._gather(k_cache, v_cache, block_table[seqs], lens), lens, scale)
        return out

    def _gather(self, k_cache: Tensor, v_cache: Tensor, table: Tensor, kv_lens: Sequence[int]) -> list[Tensor]:
        """K and V of n sequences, `[n, longest, H_kv, D]` each, zero behind a shorter one; valid until called again."""
        longest, block_size = max(kv_lens), k_cache.shape[1]
        ids = table[:, : -(-longest // block_size)]
        if min(kv_lens) < longest:  # what the table says behind a sequence's own blocks may be no block
            blocks = [-(-kv_len // block_size) for kv_len in kv_lens]
            ids = torch.where(_first(blocks, ids.shape[1], ids.device), ids, ids[:, :1])
        room = ids.numel() * k_cache[0].numel()
        if self._buffer.numel() < 2 * room or self._buffer.dtype != k_cache.dtype:
            self._buffer = k_cache.new_empty(2 * room)
        both = self._buffer[: 2 * room].view(2, -1, *k_cache.shape[1:])
        for cache, copy in zip((k_cache, v_cache), both, strict=True):
            torch.index_select(cache, 0, ids.flatten(), out=copy)
        both = both.view(2, len(ids), -1, *k_cache.shape[2:])[:, :, :longest]
        for i, kv_len in enumerate(kv_lens):
            if kv_len < longest:  # NaN in a value would show through any mask
                both[:, i, kv_len:] = 0
        return list(both)


def _of_like_length(decodes: list[tuple], most_keys: int) -> Iterator[list[tuple]]:
    """Groups of `(kv_len, ...)`, the longest first, that are worth attending to together."""
    group = []
    for one in sorted(decodes, key=lambda one: -one[0]):
        if group and ((len(group) + 1) * group[0][0] > most_keys or group[0][0] - one[0] > UNLIKE):
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _slice_or_list(numbers: Sequence[int]) -> slice | list[int]:
    """An index for these rows; a slice where they follow each other, because that copies nothing."""
    together = slice(numbers[0], numbers[-1] + 1)
    return together if list(numbers) == list(range(together.start, together.stop)) else list(numbers)


def _first(counts: Sequence[int], width: int, device: torch.device) -> Tensor:
    """`[n, width]` bool: in each row the first `counts` columns."""
    return torch.arange(width, device=device) < torch.tensor(counts, device=device)[:, None]


def _decode(q: Tensor, k: Tensor, v: Tensor, kv_lens: Sequence[int], scale: float) -> Tensor:
    """One query a sequence sees all its keys, so the H_q // H_kv heads of a group can stand in as that many queries."""
    n, longest, heads, dim = k.shape
    mask = None if min(kv_lens) == longest else _first(kv_lens, longest, k.device)[:, None, None]
    folded = q.reshape(n, heads, -1, dim)  # [n, H_kv, group, D]
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale).reshape(q.shape)


def _prefill(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q_len = kv_len: the mask is the triangle that `is_causal` stands for, and half the work can be left out."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)[0].transpose(0, 1)
