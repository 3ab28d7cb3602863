"""Lesson 9. The seam of a layer that several processes share: what is done with sums of which each has a part.

A process with the whole model has whole sums, and does nothing. Lesson 13's ranks add their parts up.
"""

from collections.abc import Callable

from torch import Tensor, nn

Exchange = Callable[[Tensor], Tensor]  # x [T, hidden_size], this process's part of a sum -> the sum over all of them


def whole(x: Tensor) -> Tensor:
    """Return x: the exchange of a process that has the whole model."""
    return x


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
        return self.exchange(self.linear(x))
