"""Course machinery. Conformance: prompts that another engine has computed, handed over with all that goes with them."""

import pytest

from mini_engine.assembly.build import open_engine
from tests.families.engines import (
    LONG,
    TIERS,
    answered,
    ask,
    check,
    check_nothing_is_lost,
    drain,
    engine_of,
    forget,
    limits_of,
    prompt_of,
    prompts_of,
    whole,
)
from tests.families.in_threads import config_of, engine_with_worker
from tests.families.rows import FIRST, each_family, nightly, parametrized, some
from tests.l19.ends import check_nothing_is_held, events, receiving


@each_family
def test_handed_over_and_then_cached(model):
    engine, worker = engine_with_worker(model)
    prompts = prompts_of(model)
    handed = [found > 0 for found in whole(prompts)]
    assert answered(engine, model, "handed over", between=worker.step) == whole(prompts), "only ends are computed here"
    found = events(engine)
    assert (found["transfers"], found["tokens"]) == (sum(handed), sum(whole(prompts)))
    assert not found["fallbacks"] and not found["losses"]
    assert answered(engine, model, "warm", between=worker.step) == whole(prompts)
    assert events(engine)["transfers"] == sum(handed), "the receiver has all of it"
    worker.check_nothing_is_held()
    check_nothing_is_lost(engine)


@each_family
def test_the_worker_s_cache_may_have_it(model):
    """What it need not compute it copies at once, and the state or the window behind it as well."""
    engine, worker = engine_with_worker(model, limits_of(16, 24))
    for when in ("cold", "from its cache", "once more"):
        assert answered(engine, model, when, [LONG], between=worker.step) == whole([LONG])
        forget(engine)
    worker.check_nothing_is_held()


@each_family
@pytest.mark.parametrize("length", [17, pytest.param(24, marks=nightly)])
def test_only_what_the_receiver_lacks_comes(model, length):
    engine, worker = engine_with_worker(model)
    answered(engine, model, "a part of it", [LONG[:length]], between=worker.step)
    before = events(engine)["tokens"]
    assert answered(engine, model, "all of it", [LONG], between=worker.step) == whole([LONG])
    assert 0 < events(engine)["tokens"] - before < whole([LONG])[0]
    worker.check_nothing_is_held()
    check_nothing_is_lost(engine)


@each_family
@pytest.mark.parametrize("num_blocks", [3, pytest.param(6, marks=nightly)])
def test_a_stage_that_is_too_small_hands_over_in_part(model, num_blocks):
    engine, _ = engine_with_worker(model)
    connector = receiving(engine)
    num_buffers = num_blocks + connector.extras.num_buffers(0, num_blocks)
    engine, worker = engine_with_worker(model, num_bytes=num_buffers * connector.stage.buffer_bytes)
    answered(engine, model, "in part", [LONG, prompt_of(65)], between=worker.step)
    assert 0 < events(engine)["tokens"] < sum(whole([LONG, prompt_of(65)])), "no prompt fits into the stage"
    worker.check_nothing_is_held()
    check_nothing_is_lost(engine)


@each_family
def test_beside_answers_that_go_on_and_preemptions(model):
    prompts = [prompt_of(length) for length in (33, 40, 41, 9)]
    least = engine_of(model, limits_of(16)).scheduler.manager.most_blocks(41 + 24)
    engine, worker = engine_with_worker(model, limits_of(16), num_blocks=2 + least, max_track_slots=3)
    answered(engine, model, "in a small pool", prompts, 24, between=worker.step)
    assert engine.scheduler.num_preemptions > 0 and events(engine)["transfers"]
    worker.check_nothing_is_held()
    check_nothing_is_lost(engine)


@each_family
def test_aborted_on_its_way(model):
    engine, worker = engine_with_worker(model, limits_of(16))
    [request] = ask(engine, [LONG], name="aborted")
    while not worker.transfers.of_id:
        engine.step()
    assert engine.abort(request.id)
    worker.check_nothing_is_held()
    assert answered(engine, model, "asked again", [LONG], between=worker.step) == whole([LONG])
    check_nothing_is_lost(engine)


@each_family
def test_behind_tiers_and_with_guesses(model):
    engine, worker = engine_with_worker(model, speculate=3, **TIERS)
    for when in ("handed over", "from the tiers"):
        assert answered(engine, model, when, between=worker.step) == whole(prompts_of(model))
        before = events(engine)["transfers"]
        forget(engine)
    assert before == events(engine)["transfers"] > 0, "the tiers have all of it"
    worker.check_nothing_is_held()


@nightly
@parametrized(some(FIRST))
def test_by_a_process(model):
    asked = config_of(model, None, {"prefill_workers": 1, "handover_min_tokens": 0})
    engine = open_engine(model.path, asked, dtype="float32", device="cpu")
    try:
        requests = ask(engine, prompts_of(model))
        drain(engine)
        assert check(model, requests, "handed over") == whole(prompts_of(model)) and events(engine)["transfers"] > 0
        check_nothing_is_held(engine)
    finally:
        engine.runner.close()
