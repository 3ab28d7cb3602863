"""Lesson 12. A connector that fails finds nothing and keeps nothing: answers are those of a cold run, none is lost."""

import logging
import random

import pytest

METHODS = (
    "get_num_new_matched_tokens", "update_state_after_alloc", "request_finished", "start_load_kv", "save_kv", "into",
)  # fmt: skip


class Flaky:
    """A connector of which `broken` fails, every other time; a load fails when all of it has been written."""

    def __init__(self, connector, broken, chance):
        self.connector, self.broken, self.chance, self.num_failed = connector, broken, chance, 0

    def __getattr__(self, name):
        inner = getattr(self.connector, name)

        def call(*args, **more):
            if name == self.broken and self.fails():
                raise OSError("the other machine is on fire")
            found = inner(*args, **more)
            return FlakyLoad(found, self) if name == "start_load_kv" and self.broken == "into" else found

        return call if callable(inner) else inner

    def fails(self):
        failed = self.chance.random() < 0.5
        self.num_failed += failed
        return failed


class FlakyLoad:
    def __init__(self, load, flaky):
        self.load, self.flaky, self.num_tokens = load, flaky, load.num_tokens

    def into(self, request_id, blocks):
        self.load.into(request_id, blocks)
        if self.flaky.fails():
            raise OSError("half a block is missing")


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("broken", METHODS)
def test_no_failure_of_a_connector_reaches_an_answer(engine_of, answers, cold, broken):
    engine = engine_of(num_blocks=13, kv_host_bytes=2**24, kv_always=True)
    manager = engine.scheduler.manager
    manager.coordinator.connector = flaky = Flaky(manager.coordinator.connector, broken, random.Random(3))
    for _ in range(4):
        assert answers(engine) == cold
        assert not manager.fault and not manager.tables
        manager.coordinator.clear()
    assert flaky.num_failed, "nothing failed, so nothing was tried"
