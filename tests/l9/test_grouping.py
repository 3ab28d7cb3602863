"""Lesson 9. Choices grouped by expert: each expert finds its rows side by side, however few or many there are."""

from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mini_engine.experts.grouping import grouped

pytestmark = pytest.mark.task(4)
E = 5  # experts here; 5 and 6 are another process's


def choices(count):
    return torch.randint(7, (count,), generator=torch.Generator().manual_seed(count))


class Operations(TorchDispatchMode):
    """Counts the operations of torch."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("experts", [choices(0), choices(1), choices(8), choices(200), torch.full((9,), 3)], ids=len)
def test_each_expert_has_its_choices_in_their_order(experts):
    order, ends = grouped(experts, E)
    assert ends.shape == (E,), f"ends has {len(ends)} numbers, not one for each of the {E} experts"
    assert sorted(order.tolist()) == list(range(len(experts))), "order has positions among the choices, each once"
    assert ends.tolist() == sorted(ends.tolist()), f"{ends.tolist()} are sizes; ends add up"
    for expert, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        mine = (experts == expert).nonzero()[:, 0].tolist()
        assert order[start:end].tolist() == mine, f"the choices of expert {expert} are {mine}: same order, all of them"


def test_ends_are_no_sizes():
    assert grouped(torch.tensor([1, 1, 0]), 2).ends.tolist() == [1, 3], "these are the groups' sizes; ends add up"


def test_the_results_index_tensors():
    groups = grouped(choices(20), E)
    assert {groups.order.dtype, groups.ends.dtype} == {torch.int64}, "torch indexes with int64"


def test_a_long_step_takes_no_more_operations_than_a_short_one():
    counts = []
    for count in (10, 1000):
        experts = choices(count)
        with Operations() as operations:
            grouped(experts, E)
        counts.append(operations.count)
    assert counts[1] <= counts[0], f"{counts[0]} operations for 10 choices, {counts[1]} for 1,000: no loop over choices"
