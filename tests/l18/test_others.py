"""Lesson 18. Rank 0 and its view of the others, without processes: how they ended, what they answer, their threads."""

from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mini_engine.base.errors import EngineDead
from mini_engine.distributed.tensor_parallel import collectives, follow, processes
from mini_engine.distributed.tensor_parallel.others import Others
from mini_engine.distributed.tensor_parallel.pulse import pulse_bytes
from mini_engine.distributed.tensor_parallel.shared_block import SharedBlock
from mini_engine.families.qwen3 import DENSE

KILLED, FAILED = -15, 1


def others(*endings, has_joined=True):
    """Return rank 0's view of ranks that have ended, each with an exit code and last words."""
    found = Others(SimpleNamespace(num_ranks=1 + len(endings), pulse=SharedBlock(pulse_bytes(1 + len(endings)))))
    found.has_joined = has_joined
    for code, words in endings:
        ours, theirs = Pipe()
        if words:
            theirs.send_bytes(words.encode())
        theirs.close()
        found.pipes.append(ours)
        found.processes.append(SimpleNamespace(exitcode=code, join=lambda: None))
    return found


@pytest.mark.parametrize(
    ("code", "words", "joined", "sentence"),
    [
        (KILLED, "", True, "rank 1 of 2 has ended (killed by SIGTERM)"),
        (FAILED, "no such block", True, "rank 1 of 2 has ended (no such block)"),
        (3, "", True, "rank 1 of 2 has ended (exit code 3)"),
        (KILLED, "", False, "rank 1 of 2 ended before it was ready (killed by SIGTERM)"),
        (FAILED, "no such file", False, "rank 1 of 2 cannot start: no such file"),
    ],
)
def test_the_sentence_says_how_a_rank_ended(code, words, joined, sentence):
    assert others((code, words), has_joined=joined).ending_of([1]) == sentence


def test_a_rank_that_died_of_an_error_that_python_printed_points_to_it():
    """A script without the guard starts itself again in each rank: that error is in the rank's own output."""
    said = others((FAILED, ""), has_joined=False).ending_of([1])
    assert said.startswith("rank 1 of 2 ended before it was ready (exit code 1)") and "__main__" in said


def test_of_ranks_that_end_at_once_the_killed_one_is_named():
    """The others say that a connection broke, which is true, and not the cause."""
    ended = others((FAILED, "connection closed by peer"), (KILLED, ""), (FAILED, "connection closed by peer"))
    assert ended.ending_of([1, 2, 3]) == "rank 2 of 4 has ended (killed by SIGTERM)"


def test_the_first_loss_is_the_one_that_is_told_and_ends_all_waiting():
    """The ends of the others follow from it."""
    view, killed, interrupted = others((KILLED, ""), (KILLED, "")), [], []
    view.place.transport = SimpleNamespace(interrupt=lambda: interrupted.append(True))
    for process in view.processes:
        process.kill = lambda: killed.append(True)
    view.lose("rank 2 was killed")
    assert (len(killed), len(interrupted)) == (2, 1), "all ranks are ended, and this one waits for none of them"
    view.lose("rank 1 has ended, too")
    assert view.lost == "rank 2 was killed"


# ---------------------------------------------------------------- answers


class OnePipe:
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
    pipes = [OnePipe(answer) for answer in answers]
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


def test_what_torch_gathers_is_contiguous(monkeypatch):
    """The columns of a larger matrix are not, and gloo refuses them."""
    given = []
    monkeypatch.setattr(collectives.dist, "gather", lambda x, parts: given.append(x))
    for rank in (0, 1):
        collectives.TorchCollectives(rank, 2).gather(torch.arange(12.0).view(3, 4)[:, 1:3])
    assert [x.is_contiguous() for x in given] == [True, True]
    assert given[0].tolist() == [[1, 2], [5, 6], [9, 10]]


# ---------------------------------------------------------------- threads


class Alone:
    """Ranks that never start, or cannot."""

    fails = False

    def __init__(self, place):
        self.place = place

    def start(self):
        if self.fails:
            raise KeyboardInterrupt

    def end(self):
        """There is nothing to end."""


@pytest.fixture
def six_threads(monkeypatch, torch_threads):
    transport = SimpleNamespace(collectives=lambda rank: None, disconnect=lambda: None)
    monkeypatch.setattr(processes, "transport_for", lambda *_: transport)
    monkeypatch.setattr(processes, "Others", Alone)


@pytest.mark.parametrize(("num_ranks", "each"), [(2, 3), (4, 1), (8, 1)])
def test_threads_are_divided_while_ranks_run_and_one_s_own_again_afterwards(six_threads, num_ranks, each):
    with processes.Ranks("somewhere", num_ranks, DENSE.stored) as ranks:
        assert (torch.get_num_threads(), ranks.place.num_threads) == (each, each)
    assert torch.get_num_threads() == 6
    ranks.close()
    assert torch.get_num_threads() == 6, "a second time it does nothing"


def test_they_are_one_s_own_again_if_ranks_cannot_start(six_threads, monkeypatch):
    monkeypatch.setattr(Alone, "fails", True)
    with pytest.raises(KeyboardInterrupt):
        processes.Ranks("somewhere", 2, DENSE.stored)
    assert torch.get_num_threads() == 6


def test_another_rank_takes_its_share_of_the_threads_before_it_loads(monkeypatch, torch_threads):
    seen = []
    monkeypatch.setattr(follow, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(follow.signal, "signal", lambda *_: None)
    monkeypatch.setattr(follow.os, "_exit", lambda code: seen.append(code))

    def read(path):
        seen.append((path, torch.get_num_threads()))
        raise EOFError  # rank 0 has ended

    place = SimpleNamespace(path="somewhere", read=read, num_threads=3, num_ranks=2, pulse=SharedBlock(pulse_bytes(2)))
    follow.follow(1, place, OnePipe(), OnePipe())
    assert seen == [(Path("somewhere"), 3), 0]
