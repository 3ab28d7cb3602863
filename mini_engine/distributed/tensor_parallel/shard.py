"""Lesson 18. Cuts a model so that each process has a share of every matrix (Shoeybi et al., 2019, arXiv:1909.08053).

Each process loads only its share: `RankCut` selects the rows and columns of each stored tensor.

Attention heads are independent, and so are the columns of a feed-forward block. So q, k, v, gate and up are cut by
columns and need no exchange; o and down are cut by rows, and their results are added over all ranks: two all-reduces a
layer. Embedding and vocabulary head are cut too (`vocabulary.py`). Norms are whole in every rank.

A hybrid's delta nets (lesson 11) are cut in the same way: their heads are independent too, and `out_proj` is cut by
rows. Queries, keys and values share one matrix and one convolution, so each of the three parts is cut separately.

The channels of a short convolution (in lesson 15's LFM3) are independent, too. Its input matrix has three parts: two
gates, as wide as `key_dim` says, and the inputs.

Experts are divided: each rank has some of them, whole, and the router with all of its rows, so that the sum over the
chosen experts is one over ranks. An expert that all tokens pass is cut as a dense block is.

Latents (lesson 16) serve all heads, so every rank computes and stores all of them. Only `q_b_proj` and `kv_b_proj`,
which expand them to each head's queries, keys and values, are cut.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mini_engine.base.errors import UserError
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.checkpoint.stored import Cut, Part
from mini_engine.distributed.tensor_parallel.vocabulary import VOCABULARY, rows_each, rows_of
from mini_engine.experts.experts import Experts
from mini_engine.families import family_named
from mini_engine.families.family import SHARED

BY_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "in_proj_z", "in_proj_b", "in_proj_a", "A_log")
BY_COLUMNS += ("dt_bias", "q_b_proj", "kv_b_proj", "filters")
BY_PARTS = ("in_proj_qkv", "conv1d", "in_proj")
BY_ROWS = ("o_proj", "down_proj", "out_proj")


def share_of(config: Qwen3Config, num_ranks: int, shared: Sequence[str] = SHARED) -> Any:
    """Return the configuration of one rank's part, for its model and its pool.

    Each rank has an equal part of the key heads, the query heads and the columns of the feed-forward block, the
    numbers in SHARED. Everything else is whole in every rank.

    Args:
        shared: the names of the numbers that are divided. A hybrid has more of them.

    Raises:
        UserError: num_ranks is less than 1, or does not divide one of the numbers. The message lists the possible
            numbers of ranks, those that divide all of them.
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
    return family_named(config.model_type).shared


@dataclass(frozen=True)
class RankCut(Cut):
    """Selects the part of a checkpoint that one rank loads.

    The outputs of o and down, and of a delta net's out, are partial sums; `layers.py` completes them.
    """

    rank: int
    num_ranks: int

    def build(self, kind: Callable[[Any], Any], config: Any) -> Any:
        """Return the rank's model, without weights. Its config has the whole vocabulary, its matrices only a share.

        Raises:
            UserError: as `share_of` does.
        """
        share = share_of(config, self.num_ranks, shared_by(config))
        model = kind(replace(share, vocab_size=rows_each(config.vocab_size, self.num_ranks)))
        model.config = share
        for module in model.modules():
            if isinstance(module, Experts):
                module.first = self.rank * module.num_experts
        return model

    def part_of(self, name: str, shape: Sequence[int], config: Any) -> Part:
        """Return the part of a stored tensor that the rank loads."""
        return part_of(name, shape, config, self.rank, self.num_ranks)


def part_of(name: str, shape: Sequence[int], config: Any, rank: int, num_ranks: int) -> Part:
    """Return the part of the parameter `name` that a rank loads: some rows, some columns of all rows, or all of it.

    Args:
        shape: of the whole parameter, outputs first. config: of the whole model.
    """
    owners, rows = set(name.split(".")), range(shape[0])
    if owners.intersection(VOCABULARY):
        return Part([rows_of(shape[0], rank, num_ranks)])
    if "experts" in owners:
        return Part([equal_part(rows, rank, num_ranks)])
    if owners.intersection(BY_ROWS):
        if name.endswith(".bias"):
            return Part([rows if rank == 0 else range(0)])  # the sum over all ranks must contain it once
        return Part([rows], columns=equal_part(range(shape[1]), rank, num_ranks))
    if owners.intersection(BY_PARTS):
        queries, keys = config.key_dim, 2 * config.key_dim
        parts = (rows[:queries], rows[queries:keys], rows[keys:])
        return Part([equal_part(part, rank, num_ranks) for part in parts])
    return Part([equal_part(rows, rank, num_ranks) if owners.intersection(BY_COLUMNS) else rows])


def equal_part(whole: range, rank: int, num_ranks: int) -> range:
    """Return one rank's part of a range that divides evenly."""
    each = len(whole) // num_ranks
    return whole[rank * each : (rank + 1) * each]


def bytes_per_step(config: Qwen3Config, num_tokens: int, itemsize: int) -> int:
    """Return the bytes that each rank contributes to the all-reduces of a step.

    There is one after the embedding and there are two in each layer, of `[num_tokens, hidden_size]` numbers of
    `itemsize` bytes each. The number of ranks does not matter.
    """
    return (2 * config.num_hidden_layers + 1) * num_tokens * config.hidden_size * itemsize


def gathered_bytes_per_step(config: Qwen3Config, num_rows: int, itemsize: int, num_ranks: int) -> int:
    """Return the bytes of logits that each rank sends to rank 0 in a step, for `num_rows` rows of logits."""
    return num_rows * rows_each(config.vocab_size, num_ranks) * itemsize
