"""Lesson 9. Completes the sums of layers that several processes share, of which each process has a part.

A process with the whole model has complete sums and does nothing. Lesson 18's ranks add up their parts.
"""

from ctypes import c_void_p
from typing import NamedTuple

import torch
from torch import Tensor, nn


class NativeExchange(NamedTuple):
    """An exchange that C++ can call.

    add_up: address of a function `int (void* meeting, void* x, int64_t count)` that completes the sum x in place and
        returns 0 unless it failed; null if sums are complete. meeting: its first argument. is_first: this process adds
        the residual, which all of them have and which must go into a sum once.
    """

    add_up: c_void_p | None
    meeting: int | None
    is_first: bool


class Exchange:
    """Completes sums: here those of a process with the whole model, which are complete. Lesson 18's add up parts."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Turn x `[T, hidden_size]`, this process's part of a sum, into the sum over all of them; return it."""
        return x

    def native(self, dtype: torch.dtype) -> NativeExchange | None:
        """Return the exchange that C++ calls instead, for rows of this dtype; None if there is none."""
        return NativeExchange(None, None, True)

    def check(self, why: int) -> None:
        """Raise an error unless `why`, the result of `add_up`, is 0."""


WHOLE = Exchange()


class Summed(nn.Module):
    """A linear layer over a part of the inputs, whose outputs are partial sums.

    Args:
        linear: computes this process's part. exchange: turns it into the sum.
    """

    def __init__(self, linear: nn.Module, exchange: Exchange) -> None:
        super().__init__()
        self.linear, self.exchange = linear, exchange

    def forward(self, x: Tensor) -> Tensor:
        """Map this process's x `[T, in_features]` to `[T, out_features]`, equal in all processes."""
        return self.exchange.all_reduce(self.linear(x))
