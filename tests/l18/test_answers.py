"""Lesson 18. What rank 0 does with an answer that does not come or is not one, and how another rank begins."""

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mini_engine.base.errors import EngineDead
from mini_engine.distributed.tensor_parallel import collectives, follow, processes
from mini_engine.distributed.tensor_parallel.pulse import pulse_bytes
from mini_engine.distributed.tensor_parallel.shared_block import SharedBlock


class Pipe:
    """A pipe with one answer in it, or none."""

    def __init__(self, answer=None):
        self.answer, self.waited = answer, []

    def poll(self, seconds):
        self.waited.append(seconds)
        return self.answer is not None

    def recv_bytes(self):
        return self.answer

    def send_bytes(self, sent):
        self.sent = sent


def ranks_with(*answers):
    """Return rank 0's view of ranks that give these answers, and what it says of them."""
    ranks, lost = object.__new__(processes.Ranks), []
    ranks.num_ranks, ranks.patience = 1 + len(answers), timedelta(seconds=7)
    pipes = [Pipe(answer) for answer in answers]
    ranks.others = SimpleNamespace(lost="", pipes=pipes, replies=pipes, await_notice=lambda: None, lose=lost.append)
    return ranks, lost


def test_each_rank_is_asked_and_given_as_long_as_it_may_take():
    ranks, lost = ranks_with(b"abc", b"def")
    assert ranks.ask("a question", 3) == [b"abc", b"def"] and not lost
    assert [pipe.waited for pipe in ranks.others.pipes] == [[7.0], [7.0]]


@pytest.mark.parametrize("second", [None, b"", b"abcd"], ids=["none", "empty", "too long"])
def test_an_answer_that_is_none_or_of_another_size_ends_the_ranks(second):
    ranks, lost = ranks_with(b"abc", second)
    with pytest.raises(EngineDead):
        ranks.ask("a question", 3)
    assert len(lost) == 1, "the others are out of step now"


def test_another_rank_takes_its_share_of_the_threads_before_it_loads(monkeypatch):
    seen, before = [], torch.get_num_threads()
    monkeypatch.setattr(follow, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(follow.signal, "signal", lambda *_: None)
    monkeypatch.setattr(follow.os, "_exit", lambda code: seen.append(code))

    def read(path):
        seen.append((path, torch.get_num_threads()))
        raise EOFError  # rank 0 has ended

    try:
        place = SimpleNamespace(
            path="somewhere", read=read, num_threads=3, num_ranks=2, pulse=SharedBlock(pulse_bytes(2))
        )
        follow.follow(1, place, Pipe(), Pipe())
        assert seen == [(Path("somewhere"), 3), 0]
    finally:
        torch.set_num_threads(before)


def test_what_torch_gathers_is_contiguous(monkeypatch):
    """The columns of a larger matrix are not, and gloo refuses them."""
    given = []
    monkeypatch.setattr(collectives.dist, "gather", lambda x, parts: given.append(x))
    for rank in (0, 1):
        collectives.TorchCollectives(rank, 2).gather(torch.arange(12.0).view(3, 4)[:, 1:3])
    assert [x.is_contiguous() for x in given] == [True, True]
    assert given[0].tolist() == [[1, 2], [5, 6], [9, 10]]
