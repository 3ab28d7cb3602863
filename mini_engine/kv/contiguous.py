"""Lesson 1. A contiguous KV cache: a K and a V tensor for each layer, with a row for every position."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mini_engine.attention.dense import causal_attention
from mini_engine.base.errors import CacheFull
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.kv.store import Store


@dataclass(frozen=True)
class ContiguousMeta:
    """One step's plan: where its tokens' K and V go, and how much history attention reads.

    positions: `[T]` int64, the index of each fed token in the sequence.
    slot_mapping: `[T]` int64, the cache row for each fed token's K and V; here the position itself.
    kv_len: number of rows to read: those written earlier and those that this step writes.
    """

    positions: Tensor
    slot_mapping: Tensor
    kv_len: int


class ContiguousKv(Store):
    """K and V of one sequence, `[max_seq_len, H_kv, D]` for each layer; row = position."""

    def __init__(
        self,
        config: Qwen3Config,
        max_seq_len: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        shape = (max_seq_len, config.num_key_value_heads, config.head_dim)
        self.max_seq_len = max_seq_len
        self.K = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.V = [torch.empty_like(k) for k in self.K]

    @property
    def bytes(self) -> int:
        """Bytes reserved, whether or not tokens ever fill them."""
        return sum(x.nbytes for x in (*self.K, *self.V))

    def set_kv(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v `[T, H_kv, D]` into the rows `slot_mapping` `[T]` of this layer, in place.

        Row i of k and v goes to row `slot_mapping[i]`.
        """
        self.K[layer][slot_mapping] = k
        self.V[layer][slot_mapping] = v

    def attend(self, layer: int, q: Tensor, meta: ContiguousMeta) -> Tensor:
        """Attend from q `[T, H_q, D]` to the first `kv_len` rows, read as a slice: no row is copied."""
        return causal_attention(q, self.K[layer][: meta.kv_len], self.V[layer][: meta.kv_len])


class CachedSequence:
    """One sequence in a contiguous cache. `cur_len` counts the tokens whose K and V are written."""

    def __init__(self, kv: ContiguousKv) -> None:
        self.kv = kv
        self.cur_len = 0

    def plan(self, token_ids: list[int]) -> ContiguousMeta:
        """Feed the tokens that are not cached yet: the whole prompt at first, then one token a step.

        Counts nothing: `cur_len` grows in `commit`. The plan's tensors are int64, on the cache's device.

        Args:
            token_ids: all tokens so far; the first `cur_len` of them are those in the cache.

        Raises:
            CacheFull: the cache has fewer rows than `token_ids` has tokens; nothing was changed.
        """
        if len(token_ids) > self.kv.max_seq_len:
            raise CacheFull(f"{len(token_ids)} tokens need {len(token_ids)} rows; this cache has {self.kv.max_seq_len}")
        positions = torch.arange(self.cur_len, len(token_ids), device=self.kv.K[0].device)
        return ContiguousMeta(positions=positions, slot_mapping=positions, kv_len=len(token_ids))

    def commit(self, meta: ContiguousMeta) -> None:
        """Record that the step has run: the K and V of its tokens are in the cache. `cur_len` remains an int."""
        self.cur_len = meta.kv_len

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens and forget the others. K and V stay: later steps overwrite them.

        Raises:
            ValueError: num_tokens is negative or more than `cur_len`; nothing was changed.
        """
        if not 0 <= num_tokens <= self.cur_len:
            raise ValueError(f"cannot keep {num_tokens} tokens of {self.cur_len}")
        self.cur_len = num_tokens


def reusable_prefix(cached_ids: list[int], prompt_ids: list[int]) -> int:
    """Count the leading tokens of `prompt_ids` whose K and V a cache holds already.

    A token's K and V depend on every token before it, so nothing after the first difference can be reused. The prompt's
    last token never counts: it has to be fed, because its logits choose the first new token.

    Args:
        cached_ids: the tokens whose K and V are written, in order.
    """
    count = 0
    for cached, wanted in zip(cached_ids, prompt_ids[:-1], strict=False):
        if cached != wanted:
            break
        count += 1
    return count
