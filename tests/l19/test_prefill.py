"""Lesson 19. What a worker does with messages, without a process: it computes, aborts and says what became of it."""

from array import array
from types import SimpleNamespace

import pytest

from mini_engine.base.errors import UserError
from mini_engine.handover.prefill import Worker
from mini_engine.handover.protocol import Ask, Cancel, Close


@pytest.fixture
def worker():
    """A worker whose engine and connector only note what they are told."""
    told = []
    manager = SimpleNamespace(tables={"1": SimpleNamespace(blocks=[3, 4]), "2": SimpleNamespace(blocks=[5])})
    engine = SimpleNamespace(
        scheduler=SimpleNamespace(manager=manager), abort=lambda *said: told.append(("abort", *said))
    )
    engine.add_request = lambda name, tokens, params, namespace: told.append(("add", name, tokens, namespace))
    connector = SimpleNamespace(
        begin=lambda ask: told.append(("begin", ask.id)), end=lambda *said: told.append(("end", *said))
    )
    worker = Worker(engine, connector, None)
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
