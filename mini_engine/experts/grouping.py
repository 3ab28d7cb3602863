"""Lesson 9. Groups the rows of a step by the expert that each was sent to: see the page *Experts*."""

from typing import NamedTuple

import torch
from torch import Tensor


class Groups(NamedTuple):
    """Choices sorted by expert; those of expert e are `order[ends[e - 1] : ends[e]]`, or from the start if e is 0.

    order: int64, positions among the choices; those that belong to no expert here come last. ends: `[E]` int64.
    """

    order: Tensor
    ends: Tensor


def grouped(experts: Tensor, num_experts: int) -> Groups:
    """Sort choices by expert; those of one expert keep their order.

    Reads nothing on the host, so that a device need not wait.

    Args:
        experts: `[N]` int64, from 0. Numbers from `num_experts` on are of experts that another process has.
    """
    numbers, order = experts.sort(stable=True)
    each = torch.arange(num_experts, device=experts.device)
    return Groups(order, torch.searchsorted(numbers, each, right=True))
