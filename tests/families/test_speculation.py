"""Course machinery. Conformance: guesses that are taken back leave no trace in blocks, windows or states."""

import random

import pytest

from mini_engine.engine.engine import Engine
from mini_engine.gpu.graphs import no_graph
from mini_engine.speculation.options import Speculation
from mini_engine.speculation.speculator import Speculator
from tests.families.engines import (
    TIERS,
    UNCACHED,
    ask,
    check,
    check_nothing_is_lost,
    drain,
    engine_of,
    forget,
    limits_of,
    prompt_of,
    prompts_of,
    right,
)
from tests.families.rows import each_family, each_kind, nightly
from tests.l14.toys import ANY_LOAD, Always
from tests.support import store_of

NEW = 20
PATHS = {"tiers": TIERS, "padded": {"capture": no_graph}, "packed": {"backend": "packed", "kernel": "auto"}}
OTHER_PATHS = {"uncached": UNCACHED, "blocks of 1": {"block_size": 1, "num_blocks": 3000}}
each_path = pytest.mark.parametrize(
    "options",
    [
        *(pytest.param(options, id=name) for name, options in PATHS.items()),
        *(pytest.param(options, id=name, marks=nightly) for name, options in OTHER_PATHS.items()),
    ],
)


def guessing(model, k=5, rows=ANY_LOAD, limits=None, **options):
    """Return an engine whose drafter knows the right answers and is wrong now and then, always at the same places."""
    for prompt in prompts_of(model):
        right(model, prompt, NEW)

    def guess(request, count):
        at, answer = len(request.output_ids), right(model, request.prompt_ids, request.params.max_tokens)
        return [token if random.Random(at + i).random() < 0.7 else 1 for i, token in enumerate(answer[at : at + count])]

    speculation = Speculation(k, max_rows=rows)
    built = engine_of(model, limits, speculate=speculation, **options)
    return Engine(built.config, built.scheduler, built.runner, Speculator(speculation, Always(guess)))


def spoken(engine, model, when, between=lambda: None):
    """Run all prompts; guesses of both kinds must have been made. Return how many prompt tokens were found."""
    requests, drafted, accepted = ask(engine, prompts_of(model), NEW, when), 0, 0
    while engine.has_unfinished:
        stats = engine.step().stats
        drafted, accepted = drafted + stats.num_drafted, accepted + stats.num_accepted
        between()
    found = check(model, requests, when)
    assert drafted > accepted > 0, "this test wants guesses of both kinds"
    return found


@each_family
def test_guesses_leave_no_trace(model):
    engine = guessing(model, limits=limits_of(16))
    for when in ("cold", "warm"):
        found = spoken(engine, model, when)
    assert any(found)
    check_nothing_is_lost(engine)


@each_kind
@each_path
def test_guesses_on_every_path(model, options):
    interval = {} if options.get("block_size") != 1 else {"checkpoint_interval": 5}
    engine = guessing(model, limits=limits_of(64, 128), **options | interval)
    for when in ("cold", "warm"):
        spoken(engine, model, when)
        if options is TIERS:
            forget(engine)
    assert options is not TIERS or store_of(engine).restored_tokens
    check_nothing_is_lost(engine)


@each_family
@pytest.mark.parametrize("k", [8, pytest.param(1, marks=nightly)])
def test_at_any_k_with_few_rows(model, k):
    engine = guessing(model, k, rows=10, limits=limits_of(7, 32))
    spoken(engine, model, f"k = {k}")
    check_nothing_is_lost(engine)


@each_family
def test_guesses_beside_preemptions(model):
    engine, chance = guessing(model, limits=limits_of(16)), random.Random(0)

    def preempt():
        if chance.random() < 0.5 and engine.scheduler.running:
            engine.scheduler.preempt(chance.choice(engine.scheduler.running))

    spoken(engine, model, "preempted", preempt)
    assert engine.scheduler.num_preemptions >= 3
    check_nothing_is_lost(engine)


@each_family
def test_what_an_answer_leaves_lies_behind_guesses_that_stand(model):
    """What a request leaves in the cache serves the next one: a state behind a wrong guess would change its tokens."""
    engine, prompt = guessing(model), prompt_of(33)
    requests = ask(engine, [prompt], NEW)
    drain(engine)
    check(model, requests, "the first turn")
    longer = (*prompt, *requests[0].output_ids)
    requests = ask(engine, [longer], NEW, "next")
    drain(engine)
    [found] = check(model, requests, "the next turn")
    assert found >= 48, "the answer passed token 48, where a checkpoint was due"
    check_nothing_is_lost(engine)
