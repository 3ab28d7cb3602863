"""Lesson 13. Cuts a model so that each process has a share of every matrix (Shoeybi et al., 2019, arXiv:1909.08053).

Attention heads are independent, and so are the columns of a feed-forward block. So q, k, v, gate and up are cut by
columns and need no exchange; o and down are cut by rows, and their results are added over all ranks: two all-reduces a
layer. Norms, embedding and vocabulary head are whole in every rank.

A hybrid's delta nets (lesson 11) are cut in the same way: their heads are independent too, and `out_proj` is cut by
rows. Queries, keys and values share one matrix and one convolution, so each of the three parts is cut.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.errors import UserError

SHARED = ("num_key_value_heads", "num_attention_heads", "intermediate_size")
SHARED_BY_HYBRIDS = (*SHARED, "linear_num_key_heads", "linear_num_value_heads")
BY_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "in_proj_z", "in_proj_b", "in_proj_a", "A_log")
BY_COLUMNS += ("dt_bias",)
BY_PARTS = ("in_proj_qkv", "conv1d")
BY_ROWS = ("o_proj", "down_proj", "out_proj")


def share_of(config: Qwen3Config, num_ranks: int, shared: Sequence[str] = SHARED) -> Any:
    """Return the configuration of one rank's part: what its model and its pool are made for.

    Each rank has an equal part of the key heads, the query heads and the columns of the feed-forward block, the
    numbers in SHARED. All else is whole in every rank.

    Args:
        shared: the names of the numbers that are divided. A hybrid has more of them.

    Raises:
        UserError: there is less than one rank, or one of the numbers cannot be divided evenly. It says which numbers of
            ranks are possible, that is, divide all of them.
    """
    whole = {name: getattr(config, name) for name in shared}
    least = math.gcd(*whole.values())
    if num_ranks < 1 or least % num_ranks:
        name = next((name for name in whole if num_ranks < 1 or whole[name] % num_ranks), shared[0])
        allowed = ", ".join(str(n) for n in range(1, least + 1) if least % n == 0)
        raise UserError(
            f"{num_ranks} ranks cannot share {name} = {whole[name]} evenly; choose one of {allowed}",
            param="tensor_parallel_size",
        )
    return replace(config, **{name: size // num_ranks for name, size in whole.items()})


def shared_by(config: Qwen3Config) -> Sequence[str]:
    """Return the names of the numbers of a configuration that ranks divide."""
    return SHARED_BY_HYBRIDS if config.has_states else SHARED


def shard(model: Any, rank: int, num_ranks: int) -> Any:
    """Return the model of one rank: its share of every matrix in `model`, and a copy of nothing that is whole.

    The outputs of o and down, and of a delta net's out, are parts of a sum; `layers.py` has them added up.

    Raises:
        UserError: as `share_of` does.
    """
    config = share_of(model.config, num_ranks, shared_by(model.config))
    weights = {name: part_of(name, w.data, model.config, rank, num_ranks) for name, w in model.named_parameters()}
    with torch.device("meta"):
        mine = type(model)(config)
    mine.load_state_dict(weights, assign=True)
    return mine.to(model.device).eval().requires_grad_(False)  # `to` as in lesson 0's loading


def part_of(name: str, weight: Tensor, config: Any, rank: int, num_ranks: int) -> Tensor:
    """Return a rank's part of the parameter `name`, in memory of its own; what is not cut is returned as it is.

    Args:
        config: of the whole model.
    """
    owners = set(name.split("."))
    if owners.intersection(BY_ROWS):
        if name.endswith(".bias"):
            return weight if rank == 0 else torch.zeros_like(weight)  # a sum of all ranks has it once
        return weight.chunk(num_ranks, dim=1)[rank].clone(memory_format=torch.contiguous_format)
    if owners.intersection(BY_PARTS):
        parts = weight.split([config.key_dim, config.key_dim, config.value_dim])
        return torch.cat([part.chunk(num_ranks)[rank] for part in parts])
    return weight.chunk(num_ranks)[rank].clone() if owners.intersection(BY_COLUMNS) else weight


def bytes_per_step(config: Qwen3Config, num_tokens: int, itemsize: int) -> int:
    """Return the bytes that each rank brings to the all-reduces of a step.

    There are two in each layer, of `[num_tokens, hidden_size]` numbers of `itemsize` bytes each. The number of ranks
    does not matter.
    """
    return 2 * config.num_hidden_layers * num_tokens * config.hidden_size * itemsize
