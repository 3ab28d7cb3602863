"""Lesson 18. torch's threads are divided among the ranks as long as they run, without processes."""

from types import SimpleNamespace

import pytest
import torch

from mini_engine.distributed.tensor_parallel import processes
from mini_engine.families.qwen3 import DENSE


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
def six_threads(monkeypatch):
    transport = SimpleNamespace(collectives=lambda rank: None, disconnect=lambda: None)
    monkeypatch.setattr(processes, "transport_for", lambda *_: transport)
    monkeypatch.setattr(processes, "Others", Alone)
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    yield
    torch.set_num_threads(before)


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
