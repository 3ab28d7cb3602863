"""Course machinery. Conformance: preempted, aborted, failed: others' answers stay right, and nothing is left behind."""

import random

import pytest

from mini_engine.gpu.graphs import no_graph
from tests.families.engines import (
    TIERS,
    UNCACHED,
    answered,
    ask,
    check,
    check_nothing_is_lost,
    drain,
    engine_of,
    limits_of,
    poison,
    prompt_of,
    prompts_of,
)
from tests.families.rows import each_exact, each_family, nightly

LATER = 24  # tokens of an answer in a small pool
each_path = pytest.mark.parametrize(
    "options",
    [{}, UNCACHED, TIERS, *(pytest.param(one, marks=nightly) for one in ({"capture": no_graph}, {"speculate": 3}))],
    ids=["cached", "uncached", "tiers", "padded", "guesses"],
)


@each_family
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_preempted_every_few_steps(model, caching):
    """Uncached, a preempted request begins again: with a state of zeros, and without any window."""
    engine, chance = engine_of(model, limits_of(16, 24), enable_prefix_caching=caching), random.Random(0)

    def preempt():
        if chance.random() < 0.3 and engine.scheduler.running:
            engine.scheduler.preempt(chance.choice(engine.scheduler.running))

    answered(engine, model, "preempted", between=preempt)
    assert engine.scheduler.num_preemptions >= 3
    check_nothing_is_lost(engine)


@each_family
@each_path
def test_a_pool_that_is_too_small_preempts_and_changes_no_token(model, options):
    prompts = [prompt_of(length) for length in (33, 40, 41, 9)]
    least = engine_of(model, limits_of(16), **options).scheduler.manager.most_blocks(41 + LATER)
    engine = engine_of(model, limits_of(16), num_blocks=2 + least, max_track_slots=3, **options)  # one alone just fits
    answered(engine, model, "in a small pool", prompts, LATER)
    assert engine.scheduler.num_preemptions > 0, "the pool was to be too small for all of them"
    check_nothing_is_lost(engine)


@each_exact
def test_promised_answers_are_never_preempted(model):
    prompts = [prompt_of(length) for length in (33, 40, 41, 9)]
    limits, most = limits_of(16, reserve_answers=True), 0
    least = engine_of(model, limits).scheduler.manager.most_blocks(41 + LATER)
    engine = engine_of(model, limits, num_blocks=1 + 2 * least)
    requests = ask(engine, prompts, LATER)
    while engine.has_unfinished:
        most = max(most, engine.step().stats.num_running)
    check(model, requests, "promised")
    assert engine.scheduler.num_preemptions == 0 and most >= 2, "two fit at once"
    check_nothing_is_lost(engine)


@each_family
@pytest.mark.parametrize("caching", [True, pytest.param(False, marks=nightly)], ids=["cached", "uncached"])
def test_no_layer_reads_a_hole(model, caching):
    """Freed blocks of windows are null blocks in the tables, as is everything behind a table's end."""
    engine = engine_of(model, limits_of(9, 16), enable_prefix_caching=caching)
    answered(engine, model, "with NaN in the null block", between=lambda: poison(engine, 0))


@each_family
def test_aborts_leave_nothing_behind(model):
    engine, chance = engine_of(model, limits_of(9, 16)), random.Random(1)
    requests = ask(engine, prompts_of(model) * 2)

    def abort():
        if chance.random() < 0.2 and engine.scheduler.requests:
            engine.abort(chance.choice(list(engine.scheduler.requests)))

    drain(engine, abort)
    ended = [request for request in requests if request.finish_reason == "length"]
    assert 0 < len(ended) < len(requests)
    check(model, ended, "beside aborts")
    check_nothing_is_lost(engine)


@each_family
def test_a_failed_step_leaves_nothing_behind(model):
    engine = engine_of(model)
    requests = ask(engine, prompts_of(model)[:3])
    run = engine.runner.run

    def fail(chunks):
        run(chunks)  # half of the layers may have written
        engine.runner.run = run
        raise MemoryError("no memory for the logits")

    engine.runner.run = fail
    drain(engine)
    assert {request.finish_reason for request in requests} == {"error"}
    answered(engine, model, "after a failed step")
    check_nothing_is_lost(engine)
