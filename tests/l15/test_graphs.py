"""Lesson 15. Replayed decode steps over groups: the same tokens, and neither a hole nor a padding row is read."""

from functools import partial

import pytest

from mini_engine.kv import pool_maker
from mini_engine.windows import store
from tests.shared.gpu_helpers import Counting, TapeCapture, recordable
from tests.shared.windows import checkpoint, engine_of
from tests.support import ask, check_answers, check_no_block_is_lost, drain, some_ids

pytestmark = pytest.mark.reference  # no task is about this


def test_recorded_steps_give_the_same_tokens(monkeypatch):
    """The pool is full of NaN where nothing was written."""
    counting, prompts = Counting(TapeCapture()), [some_ids(length, 160, seed=length) for length in (9, 40, 75, 130)]
    monkeypatch.setattr(pool_maker, "load_kernel", lambda *which, **cache: recordable)
    monkeypatch.setattr(store, "windowed", lambda kernel, window: partial(recordable, window=window))
    engine = engine_of("SSFS", 7, num_blocks=200, capture=counting)
    for layer in (*engine.runner.pool.kv.K, *engine.runner.pool.kv.V):
        layer.fill_(float("nan"))
    for when in ("cold", "behind windows of the tree"):
        requests = ask(engine, prompts, 12, when)
        drain(engine)
        found = check_answers(requests, checkpoint("SSFS", 7), when)
    assert found == [(len(ids) - 1) // 8 * 8 for ids in prompts]
    assert len(counting.replayed) >= 11, "decode steps must be replayed"
    check_no_block_is_lost(engine)
