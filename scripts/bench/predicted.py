"""Course machinery. What a step must read and compute, counted from a model's shape: the limit of its speed.

A part of a step takes at least the time to read its bytes, or to do its arithmetic if that takes longer, at the rates
that the machine was measured at.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from scripts.bench.turns import Rates

import torch
from torch import nn

from mini_engine.families import family_named
from mini_engine.model.kinds import Latent, State, Window, attending

LAST = ("o_proj", "out_proj", "mlp")  # what the last layer computes for sampled rows only


class Cost(NamedTuple):
    """The bytes that a part of a step reads, and its multiplications and additions."""

    bytes: float = 0
    flops: float = 0

    def seconds(self, rates: Rates, dtype: torch.dtype) -> float:
        """Return the least time at these rates."""
        return max(self.bytes / rates.read, self.flops / rates.matrix[str(dtype).removeprefix("torch.")])


def total(costs: Iterator[Cost]) -> Cost:
    """Return the sum of costs."""
    found = list(costs)
    return Cost(sum(cost.bytes for cost in found), sum(cost.flops for cost in found))


def step_costs(config: Any, batch: int, history: int, dtype: torch.dtype) -> dict[str, Cost]:
    """Return the costs of a decode step of `batch` sequences behind `history` tokens each."""
    return {
        "matrices": matrix_cost(config, batch, batch, dtype),
        "attention": total(decode_attention(config, kind, batch, history, dtype) for kind in config.layers),
        "states": total(state_cost(kind, batch, 1, dtype) for kind in config.layers if isinstance(kind, State)),
    }


def prompt_costs(config: Any, length: int, dtype: torch.dtype) -> dict[str, Cost]:
    """Return the costs of a step that computes a prompt of `length` tokens, and samples after it."""
    return {
        "matrices": matrix_cost(config, length, 1, dtype),
        "attention": total(prompt_attention(config, kind, length, dtype) for kind in config.layers),
        "states": total(state_cost(kind, 1, length, dtype) for kind in config.layers if isinstance(kind, State)),
    }


def weights_of(config: Any) -> dict[str, nn.Parameter]:
    """Return a model's weights without values, by name."""
    with torch.device("meta"):
        return dict(family_named(config.model_type).build(config).named_parameters())


def matrix_cost(config: Any, rows: int, samples: int, dtype: torch.dtype) -> Cost:
    """Return the cost of all matrices for `rows` tokens. Of experts, those that are met if tokens choose evenly."""
    return total(
        weight_cost(config, name, weight.numel(), rows, samples, dtype) for name, weight in weights_of(config).items()
    )


def weight_cost(config: Any, name: str, count: int, rows: int, samples: int, dtype: torch.dtype) -> Cost:
    """Return the cost of one weight of `count` numbers."""
    size = dtype.itemsize
    if ".experts." in name:
        share = config.num_experts_per_tok / config.routed_experts
        met = 1 - (1 - share) ** rows
        return Cost(met * count * size, 2 * rows * share * count)
    if "embed_tokens" in name and not config.tie_word_embeddings:
        return Cost(rows * config.hidden_size * size)
    is_last = f"layers.{config.num_hidden_layers - 1}." in name and any(part in name for part in LAST)
    is_head = "embed_tokens" in name or "lm_head" in name
    return Cost(count * size, 2 * (samples if is_last or is_head else rows) * count)


def decode_attention(config: Any, kind: Any, batch: int, history: int, dtype: torch.dtype) -> Cost:
    """Return the cost of one layer's attention in a decode step."""
    if isinstance(kind, State):
        return Cost()
    seen = batch * (min(history, kind.size) if isinstance(kind, Window) else history)
    heads, read = config.num_attention_heads, seen * layer_bytes(config, dtype)
    return Cost(
        read, 2 * seen * heads * (2 * kind.rank + kind.rope if isinstance(kind, Latent) else 2 * config.head_dim)
    )


def prompt_attention(config: Any, kind: Any, length: int, dtype: torch.dtype) -> Cost:
    """Return the cost of one layer's attention over a prompt, each token over those before it that it sees."""
    if isinstance(kind, State):
        return Cost()
    window = kind.size if isinstance(kind, Window) else length
    pairs = sum(min(position + 1, window) for position in range(length))
    wide = config.qk_head_dim + config.v_head_dim if isinstance(kind, Latent) else 2 * config.head_dim
    return Cost(length * layer_bytes(config, dtype), 2 * pairs * config.num_attention_heads * wide)


def layer_bytes(config: Any, dtype: torch.dtype) -> float:
    """Return the bytes that a layer keeps of a token."""
    return config.kv_bytes_per_token(dtype) / len(attending(config.layers))


def state_cost(kind: State, batch: int, length: int, dtype: torch.dtype) -> Cost:
    """Return the cost of one layer's states: read and written once, with three products of each number and token."""
    size = kind.num_bytes(dtype)
    return Cost(2 * batch * size, 6 * batch * length * size / 4)
