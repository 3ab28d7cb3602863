"""Course machinery. The few tensors of a page answer as torch does.

Protects readers who write lessons 0 and 1 in the page from verdicts that torch would not give.
"""

import random

from scripts.live import small_torch
from scripts.live.small_torch import SMALL, NotInThePage

import pytest
import torch

USES = [  # what the tasks of lessons 0 and 1, their tests and their known answers do, with `t` for torch
    "t.tensor([0.1, -2.0, 3.5, 3.4]).argmax()",
    "t.argmax(t.tensor([7.0, 0.0, 7.0]), dim=-1)",
    "t.tensor([1.0, 5.0, 2.0]).max(dim=-1).indices",
    "t.tensor([1.0, 5.0, 2.0]).max()",
    "t.tensor([3, 1, 2]).topk(2).indices",
    "t.tensor([3, 1, 2]).argsort(descending=True)",
    "t.tensor([3, -5, 2]).abs().argmin()",
    "t.as_tensor([4, 5, 6]).index_select(0, t.tensor([2]))",
    "t.arange(5)",
    "t.arange(2, 6)",
    "t.arange(2, 6)[-1:]",
    "t.tensor([5, 6, 7, 8])[t.tensor([1, 3])]",
    "t.tensor([5, 6, 7, 8])[1:3]",
    "t.tensor([5, 6, 7, 8])[t.tensor([True, False, False, True])]",
    "t.tensor([[1, 2], [3, 4]])[1]",
    "t.tensor([[1, 2], [3, 4]])[:, 1]",
    "t.tensor(range(3), dtype=t.long)",
    "t.ones(4, dtype=t.int64).cumsum(0) - 1",
    "t.zeros(2, 3)",
    "t.zeros(1, 3).squeeze(0)",
    "t.tensor([1, 2]).unsqueeze(1)",
    "t.tensor([1, 2]).unsqueeze(0)",
    "t.tensor([[1, 2], [3, 4]]).flatten()",
    "(t.tensor([[1, 2], [3, 4]]) != t.tensor([[1, 0], [3, 0]])).nonzero()",
    "(t.tensor([1, 2]) != t.tensor([1, 3])).sum()",
    "t.tensor([[1, 2], [3, 4]])[1, 0]",
    "t.full((1,), 7)",
    "t.zeros((2, 3)).shape",
    "t.empty(0).numel()",
    "t.tensor([1, 2]) + 1",
    "t.tensor([4, 5]) % 3",
    "(t.tensor([4, 5]) == t.tensor([4, 6])).all()",
    "t.equal(t.tensor([1, 2]), t.tensor([1, 2]))",
    "t.tensor([1, 2]).to(t.float32)",
    "t.tensor([1, 2]).device.type",
    "int(t.tensor([9]))",
    "len(t.zeros(3, 2))",
    "t.tensor([1.5, 2.5]).long()",
]


class Few:
    """`torch` as a page has it."""

    __getattr__ = staticmethod(SMALL.__getitem__)


def told(result) -> str:
    """Return a result as text: its numbers, shape and dtype."""
    if not hasattr(result, "tolist"):
        return repr(tuple(result)) if isinstance(result, tuple) else repr(result)
    return f"{result.tolist()} {tuple(result.shape)} {result.dtype}"


@pytest.mark.parametrize("use", USES)
def test_it_answers_as_torch_does(use):
    assert told(eval(use, {"t": Few()})) == told(eval(use, {"t": torch}))


def test_writing_into_rows_is_torch_s():
    for at, value in ((2, 1), (slice(1, 3), 5), ([0, 3], 2)):
        few, many = small_torch.constant(0)(4, 2), torch.zeros(4, 2)
        few[at] = value
        many[at] = value
        assert told(few) == told(many), at
    few, many = small_torch.constant(0)(3, 6), torch.zeros(3, 6)
    few[small_torch.arange(3), small_torch.tensor([1, 5, 0])] = 1.0
    many[torch.arange(3), torch.tensor([1, 5, 0])] = 1.0
    assert told(few) == told(many)


def test_random_rows_have_torch_s_best():
    chance = random.Random(0)
    for _ in range(200):
        row = [chance.choice([-1.0, 0.5, 2.0, 3.5]) for _ in range(chance.randint(1, 8))]
        assert told(small_torch.tensor(row).argmax()) == told(torch.tensor(row).argmax()), row


def test_what_it_does_not_have_says_so():
    with pytest.raises(NotInThePage, match="run this check in a terminal"):
        small_torch.tensor([1.0]).softmax(-1)
