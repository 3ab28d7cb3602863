"""Lesson 9. The seam of a layer that several processes share: what is done with sums of which each has a part.

A process with the whole model has whole sums, and does nothing. Lesson 18's ranks add their parts up.
"""

from ctypes import c_void_p
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn


class NativeExchange(NamedTuple):
    """An exchange that C++ can call.

    add_up: address of a function `int (void* meeting, void* x, int64_t count)` that completes the sum x in place and
        returns 0 unless it failed; none if sums are whole. meeting: its first argument. is_first: whether this process
        adds what all of them have, the residual: it must go into a sum once.
    """

    add_up: c_void_p | None
    meeting: int | None
    is_first: bool


class Exchange(Protocol):
    """Completes sums. `collectives.Collectives` of lesson 18 has its methods."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Turn x `[T, hidden_size]`, this process's part of a sum, into the sum over all of them; return it."""
        ...

    def native(self, dtype: torch.dtype) -> NativeExchange | None:
        """Return what C++ calls instead, for rows of this dtype; None if it cannot."""
        ...

    def check(self, why: int) -> None:
        """Raise an error unless `add_up` has returned 0."""
        ...


class Whole:
    """The exchange of a process that has the whole model."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return x."""
        return x

    def native(self, dtype: torch.dtype) -> NativeExchange:
        """Return what says that nothing is to be called."""
        return NativeExchange(None, None, True)

    def check(self, why: int) -> None:
        """Nothing was called."""


WHOLE = Whole()


class Summed(nn.Module):
    """A linear layer over a part of the inputs, whose outputs are parts of sums.

    Args:
        linear: computes this process's part. exchange: turns it into the sum.
    """

    def __init__(self, linear: nn.Module, exchange: Exchange) -> None:
        super().__init__()
        self.linear, self.exchange = linear, exchange

    def forward(self, x: Tensor) -> Tensor:
        """x `[T, in_features]` of this process -> `[T, out_features]`, the same in all of them."""
        return self.exchange.all_reduce(self.linear(x))
