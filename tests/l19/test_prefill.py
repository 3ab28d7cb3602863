"""Lesson 19. Threads of torch on both sides, and a worker's prompts that cannot be computed, without processes."""

from array import array
from types import SimpleNamespace

import pytest
import torch

from mini_engine.base.errors import UserError
from mini_engine.distributed.tensor_parallel.shared_block import SharedBlock
from mini_engine.handover import prefill, workers
from mini_engine.handover.protocol import Ask, Cancel, Close


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


@pytest.fixture
def worker():
    """A worker whose engine and connector only note what they are told."""
    told = []
    manager = SimpleNamespace(tables={"1": SimpleNamespace(blocks=[3, 4]), "2": SimpleNamespace(blocks=[5])})
    engine = SimpleNamespace(
        scheduler=SimpleNamespace(manager=manager),
        abort=lambda name: told.append(("abort", name)),
        add_request=lambda name, tokens, params, namespace: told.append(("add", name, tokens, namespace)),
    )
    connector = SimpleNamespace(
        begin=lambda ask: told.append(("begin", ask.id)), end=lambda *words: told.append(("end", *words))
    )
    worker = prefill.Worker(engine, connector, None)
    worker.told = told
    return worker


def test_a_prompt_is_expected_before_it_is_computed(worker):
    worker.hear(Ask(7, array("i", [1, 2, 3]), "mine", 0, 1, [0]))
    assert worker.told == [("begin", 7), ("add", "7", [1, 2, 3], "mine")]


def test_a_cancelled_prompt_is_aborted_and_its_buffers_given_back(worker):
    worker.hear(Cancel(7))
    assert worker.told == [("abort", "7"), ("end", 7, "cancelled", 3)], "with the blocks that requests hold now"


def test_a_prompt_that_cannot_be_computed_ends_at_once(worker):
    def refuse(*args, **options):
        raise UserError("too long")

    worker.engine.add_request = refuse
    worker.hear(Ask(7, array("i", [1]), None, 0, 1, [0]))
    assert worker.told == [("begin", 7), ("end", 7, "too long", 3)]


def test_it_closes_when_it_is_told_to(worker):
    assert not worker.is_closing
    worker.hear(Close())
    assert worker.is_closing and worker.told == []
