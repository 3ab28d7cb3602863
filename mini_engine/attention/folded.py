"""Lesson 3. Fast paged attention with torch's own operations: copies K and V through a buffer that stays in cache.

It needs no compiler and runs on any device. It gathers, like the reference, and five things make it faster.
Sequences are copied block by block into the same buffer, so the copy is still in the processor's cache when attention
reads it. Decodes of similar length are attended to together, as many as that cache can hold. The query heads of a group
are folded into the query length, so that their keys and values are read once for all of them. A whole prompt needs no
mask. And in bfloat16 a long prompt takes two large matrix products for every 128 of its tokens: SDPA's own products are
small, and slow on most processors.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.attention.contract import EVERY_KEY, Batch
from mini_engine.attention.dense import causal_attention

COPY_BYTES = 2**22  # K and V of sequences attended to together; a longer sequence is attended to alone
MAX_LEN_DIFF = 64  # keys; sequences that differ by more are not padded to one length to save a call
MIN_QUERIES = 33  # with fewer, SDPA is faster than matrix products
QUERY_TILE = 128  # queries whose scores are computed together: few enough for the cache, enough for a product


class Span(NamedTuple):
    """The rows begin … begin + q_len - 1 of q, which belong to sequence `seq` with `kv_len` keys."""

    seq: int
    begin: int
    q_len: int
    kv_len: int


class FoldedAttention:
    """Implements the contract of `mini_engine.attention.contract`. An object, to keep its buffer between calls.

    Args:
        window: the number of keys a query sees, its own included; the others are copied and masked.
    """

    def __init__(self, window: int = EVERY_KEY) -> None:
        self._buffer, self._window = CopyBuffer(), window

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float) -> Tensor:
        out, decodes = torch.zeros_like(q), []
        gather = partial(self._buffer.gather, k_cache, v_cache, batch.block_table)
        for span in read_spans(batch):
            if span.q_len == 1:
                decodes.append(span)
            elif span.q_len > 1:
                k, v = gather([span])
                rows = slice(span.begin, span.begin + span.q_len)
                out[rows] = attend_chunk(q[rows], k[0], v[0], scale, self._window)
        for group in of_similar_length(decodes, COPY_BYTES // (2 * k_cache[0, 0].nbytes)):
            rows = as_index([span.begin for span in group])
            kv_lens = [span.kv_len for span in group]
            out[rows] = attend_decodes(q[rows], *gather(group), kv_lens, scale, self._window)
        return out


def read_spans(batch: Batch) -> list[Span]:
    """Return every sequence's rows and number of keys, in order, sequences without queries included."""
    bounds, kv_lens = pairwise(batch.cu_seqlens_q.tolist()), batch.seq_lens_kv.tolist()
    return [Span(s, begin, end - begin, kv_lens[s]) for s, (begin, end) in enumerate(bounds)]


def attend_chunk(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """Compute causal attention of a sequence's last q_len tokens, in the fastest way for that length."""
    if len(q) >= MIN_QUERIES and q.device.type == "cpu" and q.dtype == torch.bfloat16 and multiplies_bfloat16():
        return attend_by_products(q, k, v, scale, window)
    if len(k) > window:
        return attend_window(q, k, v, scale, window)
    return attend_prompt(q, k, v, scale) if len(q) == len(k) else causal_attention(q, k, v, scale)


def multiplies_bfloat16() -> bool:
    """Return True if torch has oneDNN (not on macOS) and oneDNN multiplies bfloat16 on this processor."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def attend_by_products(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """Attend with two matrix products for QUERY_TILE queries at a time, over the keys that any of them sees.

    Scores are rounded to q's dtype before the softmax, as in Hugging Face's eager attention.
    """
    heads, seen = k.shape[1], len(k) - len(q)
    keys, values, out = k.permute(1, 2, 0), v.transpose(0, 1), []  # [H_kv, D, kv_len], [H_kv, kv_len, D]
    for queries in q.unflatten(1, (heads, -1)).permute(1, 2, 0, 3).split(QUERY_TILE, dim=2):  # [H_kv, group, n, D]
        group, n = queries.shape[1:3]
        seen += n
        first = max(0, seen - n - window + 1)  # the first key that the first of these queries sees
        hidden = q.new_full((n, seen - first), -torch.inf)  # added to the scores; 0 if visible
        mask = hidden.triu(seen - n - first + 1)
        if seen > window:
            mask += hidden.tril(seen - n - first - window)
        scores = torch.baddbmm(mask.repeat(group, 1), queries.flatten(1, 2), keys[:, :, first:seen], alpha=scale)
        out.append(torch.bmm(scores.softmax(dim=-1), values[:, first:seen]).view_as(queries))
    return torch.cat(out, dim=2).permute(2, 0, 1, 3).flatten(1, 2)


def attend_prompt(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend with a whole prompt, q_len = kv_len: `is_causal` replaces the triangular mask and saves half the work."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def attend_window(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """Attend with a sequence's last tokens q `[q_len, H_q, D]` to the last `window` keys of each, through a mask.

    Keys before the first visible one may be left out of k and v `[kv_len, H_kv, D]`: the mask counts from the end.
    """
    own = len(k) - len(q)  # the first query's own key
    visible = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(own).triu(own - window + 1)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, visible, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def attend_decodes(q: Tensor, k: Tensor, v: Tensor, kv_lens: Sequence[int], scale: float, window: int) -> Tensor:
    """Attend with one query a sequence. One mask serves all heads, so the heads of a group are folded into queries."""
    if (behind := min(kv_lens) - window) > 0:  # the leading keys that no sequence sees
        k, v, kv_lens = k[:, behind:], v[:, behind:], [kv_len - behind for kv_len in kv_lens]
    n, longest, heads, dim = k.shape
    mask = None if min(kv_lens) == longest else last_columns(kv_lens, longest, window, k.device)[:, None, None]
    folded = q.reshape(n, heads, -1, dim)  # [n, H_kv, group, D]
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale).reshape(q.shape)


def of_similar_length(decodes: Sequence[Span], most_keys: int) -> Iterator[list[Span]]:
    """Yield groups to attend to together, longest sequences first: at most `most_keys` keys, padding included."""
    group: list[Span] = []
    for span in sorted(decodes, key=lambda span: -span.kv_len):
        longest = group[0].kv_len if group else span.kv_len
        if group and ((len(group) + 1) * longest > most_keys or longest - span.kv_len > MAX_LEN_DIFF):
            yield group
            group = []
        group.append(span)
    if group:
        yield group


class CopyBuffer:
    """A buffer for copies of keys and values. Each copy is valid until the next one overwrites it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def gather(
        self, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, spans: Sequence[Span]
    ) -> tuple[Tensor, Tensor]:
        """Return K and V of these sequences, `[n, longest, H_kv, D]` each, zero past the end of shorter sequences."""
        kv_lens = [span.kv_len for span in spans]
        ids = blocks_to_copy(block_table[as_index([span.seq for span in spans])], kv_lens, k_cache.shape[1])
        both = self._room(k_cache, ids.numel())
        for cache, copy in zip((k_cache, v_cache), both, strict=True):
            torch.index_select(cache, 0, ids.flatten(), out=copy)
        both = both.view(2, len(spans), -1, *k_cache.shape[2:])[:, :, : max(kv_lens)]
        longest = both.shape[2]
        for i, kv_len in enumerate(kv_lens):
            if kv_len < longest:  # NaN in a value would show through any mask
                both[:, i, kv_len:] = 0
        k, v = both.unbind()
        return k, v

    def _room(self, cache: Tensor, num_blocks: int) -> Tensor:
        """Return `[2, num_blocks, block_size, H_kv, D]` in the cache's dtype, uninitialized."""
        numel = 2 * num_blocks * cache[0].numel()
        if self._memory.numel() < numel or self._memory.dtype != cache.dtype:
            self._memory = cache.new_empty(numel)
        return self._memory[:numel].view(2, num_blocks, *cache.shape[1:])


def blocks_to_copy(table: Tensor, kv_lens: Sequence[int], block_size: int) -> Tensor:
    """Return `[n, most_blocks]` ids: each sequence's own blocks, padded with its first one.

    The table's own entries past a sequence's blocks may not be block ids at all.
    """
    longest = max(kv_lens)
    ids = table[:, : -(-longest // block_size)]
    if min(kv_lens) == longest:
        return ids
    counts = [-(-kv_len // block_size) for kv_len in kv_lens]
    return torch.where(first_columns(counts, ids.shape[1], ids.device), ids, ids[:, :1])


def first_columns(counts: Sequence[int], width: int, device: torch.device) -> Tensor:
    """Return `[n, width]` bool: True in the first `counts` columns of each row."""
    return torch.arange(width, device=device) < torch.tensor(counts, device=device)[:, None]


def last_columns(counts: Sequence[int], width: int, window: int, device: torch.device) -> Tensor:
    """Return `[n, width]` bool: True in the last `window` of the first `counts` columns of each row."""
    visible = first_columns(counts, width, device)
    if width > window:
        visible &= ~first_columns([count - window for count in counts], width, device)
    return visible


def as_index(numbers: Sequence[int]) -> slice | list[int]:
    """Return an index for these rows: a slice if they are consecutive, because that copies nothing."""
    together = slice(numbers[0], numbers[-1] + 1)
    return together if list(numbers) == list(range(together.start, together.stop)) else list(numbers)
