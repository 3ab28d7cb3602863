"""Lesson 18. The collectives of ranks: all-reduce, and gather to rank 0. Every call is counted.

A collective is a meeting: each rank waits in it for all others, and all must join the same ones in the same order.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mini_engine.layers.exchange import Exchange, NativeExchange


@dataclass
class Traffic:
    """This rank's traffic through its collectives.

    calls: the number of collectives. bytes: of its own tensors. seconds: until the results were there, waiting
        included.
    """

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0

    @contextmanager
    def counting(self, x: Tensor) -> Iterator[None]:
        """Count the collective in the `with` block, to which this rank contributes x."""
        begun = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begun
        self.calls += 1
        self.bytes += x.nbytes


class Collectives(Exchange):
    """The meetings of the ranks of one model.

    Attributes:
        rank: this process's number, from 0. num_ranks: the number of processes. traffic: this rank's so far.
    """

    rank: int
    num_ranks: int
    traffic: Traffic

    def gather(self, x: Tensor) -> Tensor:
        """Return all ranks' x `[R, n]` side by side, `[R, num_ranks * n]`, in rank 0. Others get their own back."""
        raise NotImplementedError

    def native(self, dtype: torch.dtype) -> NativeExchange | None:
        """Return the exchange that lesson 9's C++ calls in place of `all_reduce`. None: it can call none."""
        return None


class TorchCollectives(Collectives):
    """The collectives of `torch.distributed`'s process group: gloo between CPUs, NCCL between GPUs (never run).

    The group must exist before the first call.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.traffic = Traffic()

    def all_reduce(self, x: Tensor) -> Tensor:
        with self.traffic.counting(x):
            dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.num_ranks)] if self.rank == 0 else None
        with self.traffic.counting(x):
            dist.gather(x.contiguous(), parts)
        return x if parts is None else torch.cat(parts, dim=1)
