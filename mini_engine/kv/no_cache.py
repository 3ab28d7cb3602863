"""Lesson 0. No cache: every step recomputes K and V of every token."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mini_engine.attention.dense import causal_attention
from mini_engine.kv.store import Store


@dataclass(frozen=True)
class NoCacheMeta:
    """One step's plan. positions: `[T]` int64, the index of each fed token in the sequence."""

    positions: Tensor

    @property
    def slot_mapping(self) -> Tensor:
        """The destination of each token's K and V: without a cache, the token's own row of this step."""
        return self.positions


class NoCache(Store):
    """The store that keeps nothing between steps: attention reads the K and V of the same step."""

    bytes = 0

    def set_kv(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Hold this layer's k and v `[T, H_kv, D]` for the call of `attend` that follows."""
        self.k, self.v = k, v

    def attend(self, layer: int, q: Tensor, meta: NoCacheMeta) -> Tensor:
        """Attend from q `[T, H_q, D]` to this step's own keys and values; returns `[T, H_q, D]`."""
        return causal_attention(q, self.k, self.v)


class Recompute:
    """The plan of a sequence without a cache: feed every token in every step."""

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = device

    def plan(self, token_ids: list[int]) -> NoCacheMeta:
        """Feed every token of `token_ids`, at positions 0, 1, 2, …; the plan's tensor is on `self.device`."""
        return NoCacheMeta(positions=torch.arange(len(token_ids), device=self.device))

    def commit(self, meta: NoCacheMeta) -> None:
        """Do nothing: no K and V outlive the step."""
