"""Lesson 14. Guesses for lesson 11's hybrids: tokens equal Hugging Face's, and no state has seen a wrong guess."""

import copy
import functools
import random

import pytest

from mini_engine.assembly.build import build_engine
from mini_engine.base.errors import UserError
from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Scheduler
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.speculation.options import Speculation
from mini_engine.speculation.speculator import Speculator
from tests.l11.models import SELECTED, both, greedy
from tests.l14.toys import Always, drain
from tests.support import some_ids

pytestmark = pytest.mark.reference  # it imports transformers' hybrids, which takes seconds
NEW = 20
LENGTHS = (1, 7, 16, 33)
each_family = pytest.mark.parametrize("family", SELECTED)


def prompt_of(length):
    return tuple(some_ids(length, 160, seed=length))


def mostly_right(family):
    """Return a drafter that knows Hugging Face's answers and is wrong now and then, always at the same places."""

    def guess(request, count):
        at, answer = len(request.output_ids), greedy(family, tuple(request.prompt_ids), NEW)
        return [token if random.Random(at + i).random() < 0.7 else 1 for i, token in enumerate(answer[at : at + count])]

    return Always(guess)


@functools.cache
def model_of(family, backend):
    model = copy.deepcopy(both(family)[0])
    return build_engine(model, backend=backend, num_blocks=2).runner.model  # fast layers take its weights over


def engine_for(family, k=5, backend="reference", chunk=64, num_seqs=8, rows=64, **options):
    """Return an engine over a hybrid, whose guesses are mostly right."""
    limits = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=64, chunked_prefill_size=chunk, watermark=0)
    speculation = Speculation(k, max_rows=rows)
    defaults = dict(num_blocks=64, block_size=8, kernel="torch", max_track_slots=24, checkpoint_interval=16)
    built = build_engine(
        model_of(family, backend), backend=backend, scheduler_config=limits, speculate=speculation, **defaults | options
    )
    scheduler = Scheduler(built.scheduler.manager, limits)
    return Engine(built.config, scheduler, built.runner, Speculator(speculation, mostly_right(family)))


def check(engine, family, between=lambda: None):
    """Run the prompts and compare; return how many of the prompts' tokens were found in the cache."""
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    asked = [engine.add_request(str(n), list(prompt_of(n)), params) for n in LENGTHS]
    accepted = drafted = 0
    while engine.has_unfinished:
        stats = engine.step().stats
        accepted, drafted = accepted + stats.num_accepted, drafted + stats.num_drafted
        between()
    for request in asked:
        want = greedy(family, tuple(request.prompt_ids), NEW)
        assert request.output_ids == want, f"the answer to {len(request.prompt_ids)} tokens differs; {request.error}"
    assert accepted and drafted > accepted, "this test wants guesses of both kinds"
    check_nothing_is_lost(engine)
    return [request.num_cached_tokens for request in asked]


def check_nothing_is_lost(engine):
    manager = engine.scheduler.manager
    memory = manager.coordinator.memory
    assert sorted(memory.free_slots) == list(range(1, memory.states.max_reqs + 1)), "a guess's state slot leaked"
    assert manager.blocks_by_state.held == 0


@each_family
@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.nightly), 5])
@pytest.mark.parametrize("backend", ["reference", "torch", "packed"])
def test_any_layers_at_any_k(family, k, backend):
    try:
        engine = engine_for(family, k, backend)
    except UserError as why:
        pytest.skip(str(why))
    check(engine, family)


@each_family
def test_behind_a_checkpoint(family):
    engine = engine_for(family)
    assert check(engine, family) == [0, 0, 0, 0]
    assert check(engine, family) == [0, 0, 8, 32], "a prompt that comes again begins at its last whole block"


@each_family
@pytest.mark.parametrize("chunk", [1, 7])
def test_beside_prompts_in_chunks(family, chunk):
    check(engine_for(family, chunk=chunk), family)


@each_family
def test_preempted_every_few_steps(family):
    engine, chance = engine_for(family), random.Random(0)

    def preempt():
        if chance.random() < 0.8 and engine.scheduler.running:
            engine.scheduler.preempt(chance.choice(engine.scheduler.running))

    check(engine, family, preempt)
    assert engine.scheduler.num_preemptions >= 3


def test_no_more_guesses_than_there_are_slots_for():
    engine = engine_for("every fourth attends", num_seqs=2, rows=4)
    memory = engine.scheduler.manager.coordinator.memory
    assert memory.num_spare == 4
    check(engine, "every fourth attends")


def test_an_answer_s_checkpoints_lie_behind_guesses_that_stand():
    """What a request leaves in the cache serves the next one: a state behind a wrong guess would change its tokens."""
    family = "every fourth attends"
    engine, prompt = engine_for(family), prompt_of(33)
    answer = greedy(family, prompt, NEW)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    engine.add_request("first", list(prompt), params)
    drain(engine)
    longer = (*prompt, *answer)
    request = engine.add_request("next", list(longer), params)
    drain(engine)
    assert request.num_cached_tokens == 48, "the answer passed token 48, where a checkpoint was due"
    assert request.output_ids == greedy(family, longer, NEW)
