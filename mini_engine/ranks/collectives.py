"""Lesson 18. What ranks do together: they add up, and rank 0 gathers. Every call is counted.

A collective is a meeting: each rank waits in it for all others, and all must come to the same ones in the same order.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mini_engine.layers.exchange import NativeExchange


@dataclass
class Traffic:
    """What this rank has brought to its collectives.

    calls: how many there were. bytes: of its own tensors. seconds: until the results were there, waiting included.
    """

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0

    @contextmanager
    def counting(self, x: Tensor) -> Iterator[None]:
        """Count the collective in the `with` block, to which this rank brings x."""
        begun = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begun
        self.calls += 1
        self.bytes += x.nbytes


class Collectives(Protocol):
    """The meetings of the ranks of one model.

    Attributes:
        rank: this process's number, from 0. num_ranks: how many there are. traffic: what this rank has brought so far.
    """

    rank: int
    num_ranks: int

    @property
    def traffic(self) -> Traffic: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add x, of one shape and dtype in all ranks, over all of them, in place, and return it."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Return all ranks' x `[R, n]` side by side, `[R, num_ranks * n]`, in rank 0. Others get their own back."""
        ...

    def native(self, dtype: torch.dtype) -> NativeExchange | None:
        """Return what lesson 9's C++ calls in place of `all_reduce`, or None."""
        ...

    def check(self, why: int) -> None:
        """Raise RuntimeError unless C++ was told 0."""
        ...


class TorchCollectives:
    """The collectives of `torch.distributed`'s process group: gloo between CPUs, NCCL between GPUs (never run).

    The group must have been made when the first of them is called.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.traffic = Traffic()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add x over all ranks, in place, and return it."""
        with self.traffic.counting(x):
            dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Return all ranks' x `[R, n]` side by side in rank 0, and x in the others."""
        parts = [torch.empty_like(x) for _ in range(self.num_ranks)] if self.rank == 0 else None
        with self.traffic.counting(x):
            dist.gather(x.contiguous(), parts)
        return x if parts is None else torch.cat(parts, dim=1)

    def native(self, dtype: torch.dtype) -> None:
        """C++ cannot call this one."""

    def check(self, why: int) -> None:
        """Nothing was called from C++."""
