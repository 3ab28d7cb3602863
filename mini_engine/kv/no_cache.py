"""Lesson 0. No cache: every step computes K and V of every token again."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mini_engine.attention.dense import causal_attention


@dataclass(frozen=True)
class ForwardMeta:
    """This step's tokens. `positions` `[T]` int64 is each one's place in the sequence."""

    positions: Tensor

    @property
    def slot_mapping(self) -> Tensor:
        """Where each token's K and V go: with no cache, to its own row of this step."""
        return self.positions


class NoCache:
    """The store that keeps nothing: attention reads the K and V that this very step computed."""

    bytes = 0

    def set_kv(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Hold this layer's k and v `[T, H_kv, D]` until `attend`, which comes next."""
        self.k, self.v = k, v

    def attend(self, layer: int, q: Tensor, meta: ForwardMeta) -> Tensor:
        """Attention of q `[T, H_q, D]` over this step's own keys and values, `[T, H_q, D]`."""
        return causal_attention(q, self.k, self.v)


class Recompute:
    """The plan of a sequence that has no cache: feed everything, every time."""

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = device

    def plan(self, token_ids: list[int]) -> ForwardMeta:
        """Feed every token of `token_ids`, from position 0."""
        return ForwardMeta(positions=torch.arange(len(token_ids), device=self.device))

    def commit(self, meta: ForwardMeta) -> None:
        """Nothing to remember."""
