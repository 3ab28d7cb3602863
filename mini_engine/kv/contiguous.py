"""Lesson 1. A contiguous KV cache: one tensor a layer, as long as the longest sequence may become."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mini_engine.attention.dense import causal_attention
from mini_engine.config import Qwen3Config
from mini_engine.errors import CacheFull


@dataclass(frozen=True)
class ForwardMeta:
    """One step's plan: where its tokens go and how much history they read.

    positions: `[T]` int64, each token's place in the sequence.
    slot_mapping: `[T]` int64, the cache row that takes each token's K and V; here the position itself.
    kv_len: rows that hold K and V once this step has written its own.
    """

    positions: Tensor
    slot_mapping: Tensor
    kv_len: int


class ContiguousKv:
    """K and V of one sequence, `[max_seq_len, H_kv, D]` for each layer, row = position."""

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
        """Bytes reserved, whether or not a token ever comes to use them."""
        return sum(x.nbytes for x in (*self.K, *self.V))

    def set_kv(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v `[T, H_kv, D]` into the rows `slot_mapping` `[T]` of this layer."""
        self.K[layer][slot_mapping] = k
        self.V[layer][slot_mapping] = v

    def attend(self, layer: int, q: Tensor, meta: ForwardMeta) -> Tensor:
        """Attention of q `[T, H_q, D]` over the first `kv_len` rows: a slice, nothing is copied."""
        return causal_attention(q, self.K[layer][: meta.kv_len], self.V[layer][: meta.kv_len])


class CachedSequence:
    """One sequence in a contiguous cache. `cur_len` counts the tokens whose KV is written."""

    def __init__(self, kv: ContiguousKv) -> None:
        self.kv = kv
        self.cur_len = 0

    def plan(self, token_ids: list[int]) -> ForwardMeta:
        """Feed the tokens that are not cached yet: the whole prompt at first, then one at a time.

        Raises:
            CacheFull: the cache is shorter than `token_ids`; nothing was changed.
        """
        if len(token_ids) > self.kv.max_seq_len:
            raise CacheFull(f"{len(token_ids)} tokens need as many rows; this cache has {self.kv.max_seq_len}")
        positions = torch.arange(self.cur_len, len(token_ids), device=self.kv.K[0].device)
        return ForwardMeta(positions=positions, slot_mapping=positions, kv_len=len(token_ids))

    def commit(self, meta: ForwardMeta) -> None:
        """The step has run: its tokens' KV is in the cache."""
        self.cur_len = meta.kv_len
