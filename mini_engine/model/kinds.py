"""Lesson 0. The kinds of layers, by what each keeps of a text.

Lesson 0's models keep K and V of every token in every layer. A config has one kind for each layer, in the model's
order (`Qwen3Config.layers`).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

FULL, SLIDING = "full_attention", "sliding_attention"  # the names of the first two kinds in config.json


class Full(NamedTuple):
    """K and V of every token."""


class Window(NamedTuple):
    """K and V of the last `size` tokens, the query's own included."""

    size: int


class State(NamedTuple):
    """A fixed number of tensors for each request, however long its text is.

    shapes: the shape and dtype of each; None is the model's dtype.
    """

    shapes: tuple[tuple[tuple[int, ...], torch.dtype | None], ...]

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one request's tensors in a model of this dtype."""
        return sum(math.prod(shape) * (own or dtype).itemsize for shape, own in self.shapes)


class Latent(NamedTuple):
    """Of every token a vector of `rank` numbers, from which K and V are computed, and a key of `rope` with RoPE."""

    rank: int
    rope: int


Kind = Full | Window | State | Latent


def attending(layers: Sequence[Kind]) -> list[Kind]:
    """Return the kinds of the layers that attend, in the model's order: those without a state."""
    return [kind for kind in layers if not isinstance(kind, State)]


def state_bytes(layers: Sequence[Kind], dtype: torch.dtype) -> int:
    """Return the bytes of one request's states, however long it is, in a model of this dtype."""
    return sum(kind.num_bytes(dtype) for kind in layers if isinstance(kind, State))
