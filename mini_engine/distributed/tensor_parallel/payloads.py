"""Lesson 18. Lesson 12's payloads over ranks: assembled in one process's layout, however many ranks there are.

    a block's K in one process    token 0: head 0 │ head 1 │ token 1: head 0 │ head 1 │ …
    rank 0's part                 token 0: head 0 │          token 1: head 0 │ …
    rank 1's part                 token 0:          head 1 │ token 1:          head 1 │ …

So a record has the same name and layout whether one process or several wrote it, and an engine with another number of
ranks can use the directory. K and V may differ in their last bits, because ranks add up in another order, as may two
backends. Blocks of latents (lesson 16) need no assembly: each rank has all of them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.hybrid.gdn_pool import GdnPool
from mini_engine.tiers.records import Bytes


class Run(NamedTuple):
    """A run of a rank's payload: the same pieces `times` times, one after another; a rank has a part of each piece.

    pieces: bytes of this rank's part of each.
    """

    times: int
    pieces: Sequence[int]


def has_heads(config: Qwen3Config) -> bool:
    """Return True if each rank's pool has a share of every block: with more key heads, a token's K would be larger."""
    return replace(config, num_key_value_heads=2 * config.num_key_value_heads).k_shape != config.k_shape


def block_layout(tensors: Sequence[Tensor]) -> list[Run]:
    """Return the layout of a block's payload; tensors: a rank's, `[num_blocks, block_size, H_kv, D]` each."""
    return [Run(tensor.shape[1], [tensor[0, 0].nbytes]) for tensor in tensors]


def state_layout(pool: GdnPool) -> list[Run]:
    """Return the layout of a slot's payload; pool: a rank's."""
    recurrent, conv = pool.recurrent_state, pool.conv_state
    sizes = [channels * conv[0, 0, 0].nbytes for channels in pool.conv_parts]
    of_heads = [Run(len(recurrent), [recurrent[0, 0].nbytes])] if recurrent.nbytes else []
    return [*of_heads, Run(len(conv), sizes)]


def join(parts: Sequence[Tensor], layout: Sequence[Run]) -> Tensor:
    """Return payloads in the layout of one process, `[n, bytes]` uint8.

    Args:
        parts: each rank's `[n, bytes / num_ranks]` uint8.
    """
    sizes = [run.times * sum(run.pieces) for run in layout]
    whole = []
    for run, *ours in zip(layout, *(part.split(sizes, dim=1) for part in parts), strict=True):
        pieces = [part.unflatten(1, (run.times, -1)).split(list(run.pieces), dim=2) for part in ours]
        whole += [torch.cat([rank[i] for i in range(len(run.pieces)) for rank in pieces], dim=2).flatten(1)]
    return torch.cat(whole, dim=1)


def split(whole: Tensor, layout: Sequence[Run], num_ranks: int) -> list[Tensor]:
    """Return each rank's part of payloads `[n, bytes]` uint8: the inverse of `join`."""
    parts: list[list[Tensor]] = [[] for _ in range(num_ranks)]
    sizes = [num_ranks * run.times * sum(run.pieces) for run in layout]
    for run, ours in zip(layout, whole.split(sizes, dim=1), strict=True):
        pieces = ours.unflatten(1, (run.times, -1)).split([num_ranks * piece for piece in run.pieces], dim=2)
        for rank, mine in enumerate(parts):
            mine.append(torch.cat([piece.chunk(num_ranks, dim=2)[rank] for piece in pieces], dim=2).flatten(1))
    return [torch.cat(mine, dim=1) for mine in parts]


def as_rows(payloads: Sequence[Bytes]) -> Tensor:
    """Return payloads of one size as `[n, bytes]` uint8, a copy."""
    return torch.frombuffer(bytearray().join(payloads), dtype=torch.uint8).view(len(payloads), -1)


def as_payloads(rows: Tensor) -> list[memoryview]:
    """Return the rows of `[n, bytes]` uint8 as payloads."""
    return [memoryview(row) for row in rows.numpy()]
