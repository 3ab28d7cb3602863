"""Course machinery. The experts of a layer: feed-forward blocks of one shape, of which each token passes a few.

A step has T · k choices: k experts for each token. They are sorted by expert once, and each expert that was chosen
computes all of its rows in one product, so its weights are read once a step, however many rows it has.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.experts.grouping import grouped

Run = Callable[[Tensor, Tensor], Tensor]  # computes rows `[N, H]` that are sorted by expert, given `Groups.ends`


class Experts(nn.Module):
    """SwiGLUs in two tensors, gate_up_proj `[E, 2 * I, H]` and down_proj `[E, H, I]`.

    Attributes:
        first: the number of the first expert here. In one process it is 0; a rank has a share of them.
        recordable: False: how many rows each expert has is read on the host, so steps cannot be captured (lesson 10).
    """

    recordable = False

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.first = 0
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))

    @property
    def num_experts(self) -> int:
        """The number of experts that this process has."""
        return len(self.gate_up_proj)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return `[T, H]`: for each row of x `[T, H]`, the weighted sum of what its experts make of it.

        Args:
            experts: `[T, k]` int64; other processes add the results of those that this one lacks.
            weights: `[T, k]` float32.
        """
        return weighted_sum(x, experts - self.first, weights, self.num_experts, partial(in_turn, self.run))

    def run(self, expert: int, rows: Tensor) -> Tensor:
        """Return the result of one of these experts, counted from the first, for some rows."""
        gate, up = F.linear(rows, self.gate_up_proj[expert]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down_proj[expert])


def weighted_sum(x: Tensor, experts: Tensor, weights: Tensor, num_experts: int, run: Run) -> Tensor:
    """Return `[T, H]`: the sums over each token's experts, in the order of its choices, added up in float32.

    Args:
        experts: `[T, k]` int64; those outside 0 … num_experts - 1 add nothing.
    """
    choices = experts.where(experts >= 0, num_experts).flatten()
    order, ends = grouped(choices, num_experts)
    results = x.new_empty(len(order), x.shape[1])
    results[order] = run(x[order // experts.shape[1]], ends)
    return (results.unflatten(0, experts.shape) * weights[:, :, None]).sum(1).to(x.dtype)


def in_turn(run: Callable[[int, Tensor], Tensor], rows: Tensor, ends: Tensor) -> Tensor:
    """Return the results of rows that are sorted by expert, computed by one expert after another.

    Args:
        run: computes the rows of an expert. Those behind the last expert's are 0.
    """
    results, start = torch.zeros_like(rows), 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            results[start:end] = run(expert, rows[start:end])
        start = end
    return results
