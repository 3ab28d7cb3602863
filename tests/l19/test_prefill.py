"""Lesson 19. Threads of torch on both sides, and a worker's prompts that cannot be computed, without processes."""

from array import array
from types import SimpleNamespace

import pytest
import torch

from mini_engine.base.errors import UserError
from mini_engine.distributed.tensor_parallel.shared_block import SharedBlock
from mini_engine.handover import prefill, workers
from mini_engine.handover.protocol import Ask


class NoProcess:
    """A worker's handle that starts nothing, or cannot."""

    fails = False

    def __init__(self, number, seat, context):
        if self.fails:
            raise KeyboardInterrupt
        self.number, self.seat = number, seat

    def kill(self):
        """There is nothing to kill."""


@pytest.fixture
def six_threads(monkeypatch, torch_threads):
    monkeypatch.setattr(workers, "Handle", NoProcess)


def start(num_workers):
    return workers.PrefillWorkers(lambda: None, num_workers, SharedBlock(64), None, 4)


@pytest.mark.parametrize(("num_workers", "each"), [(1, 3), (2, 2), (9, 1)])
def test_threads_are_divided_while_workers_run_and_one_s_own_again_afterwards(six_threads, num_workers, each):
    started = start(num_workers)
    assert torch.get_num_threads() == each
    assert [handle.seat.num_threads for handle in started.handles.values()] == [each] * num_workers
    for _ in range(2):  # a second time it does nothing
        started.close()
        assert torch.get_num_threads() == 6


def test_they_are_one_s_own_again_if_a_worker_cannot_start(six_threads, monkeypatch):
    monkeypatch.setattr(NoProcess, "fails", True)
    with pytest.raises(KeyboardInterrupt):
        start(2)
    assert torch.get_num_threads() == 6


def test_a_worker_takes_its_share_of_the_threads_before_it_loads(monkeypatch, torch_threads):
    seen, sent = [], []
    monkeypatch.setattr(prefill, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(prefill.signal, "signal", lambda *_: None)

    def build(block, say):
        seen.append(torch.get_num_threads())
        raise UserError("no such checkpoint")

    prefill.work(prefill.Seat(build, None, SharedBlock(128), 3), SimpleNamespace(send=sent.append))
    assert seen == [3] and sent[0].why == "no such checkpoint"


# ---------------------------------------------------------------- in a worker


def test_a_prompt_that_cannot_be_computed_ends_at_once():
    said = []

    def refuse(*args, **options):
        raise UserError("too long")

    manager = SimpleNamespace(tables={"1": SimpleNamespace(blocks=[3, 4]), "2": SimpleNamespace(blocks=[5])})
    engine = SimpleNamespace(scheduler=SimpleNamespace(manager=manager), add_request=refuse)
    connector = SimpleNamespace(begin=lambda ask: said.append(ask.id), end=lambda *words: said.append(words))
    prefill.Worker(engine, connector, None).hear(Ask(7, array("i", [1]), None, 0, 1, [0]))
    assert said == [7, (7, "too long", 3)], "with the blocks that requests hold now"
