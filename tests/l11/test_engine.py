"""Lesson 11. Every token equals Hugging Face's: batched, in chunks, preempted, behind a checkpoint, beside an abort."""

import random
from functools import partial

import pytest
import torch

from mini_engine.assembly.build import build_engine
from mini_engine.assembly.storage import planner
from mini_engine.base.errors import UserError
from mini_engine.engine.request import FinishReason
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.hybrid.plan import add_slots
from mini_engine.hybrid.sizes import Slots, slots_in_budget
from mini_engine.model.kinds import state_bytes
from tests.shared.hybrids import SELECTED, both, check_nothing_is_lost, checkpoint, hybrid
from tests.support import ask, check_answers, drain, some_ids

NEW = 12
LENGTHS = (1, 2, 7, 31, 32, 33, 65, 130)  # around blocks of 8, checkpoints at 32 and rounds of 64
FAMILY = "every fourth attends"
each_family = pytest.mark.parametrize("family", SELECTED)
nightly = pytest.mark.nightly


def prompts_of(lengths=LENGTHS):
    return [tuple(some_ids(length, 160, seed=length)) for length in lengths]


def check(family, requests, when):
    return check_answers(requests, checkpoint(family), when)


@each_family
def test_batched_and_then_behind_their_own_checkpoints(family):
    engine, prompts = hybrid(family), prompts_of()
    for when in ("batched", "behind a checkpoint"):
        requests = ask(engine, prompts, NEW, when)
        drain(engine)
        found = check(family, requests, when)
    assert found == [(n - 1) // 8 * 8 for n in LENGTHS], "a prompt that comes again begins at its last whole block"
    check_nothing_is_lost(engine)


@each_family
@pytest.mark.parametrize("chunk", [1, 7, pytest.param(33, marks=nightly), 64])
def test_in_chunks_beside_decodes(family, chunk):
    prompts = prompts_of() if chunk > 1 else prompts_of(LENGTHS[:6])
    engine = hybrid(family, chunk=chunk, budget=max(16, chunk))
    requests = ask(engine, prompts, NEW)
    drain(engine)
    check(family, requests, f"in chunks of {chunk}")
    check_nothing_is_lost(engine)


@pytest.mark.parametrize("caching", [False, True])
@each_family
def test_preempted_every_few_steps(family, caching):
    """Without prefix caching a preempted request begins again with a state of zeros, otherwise with a checkpoint."""
    engine, chance = hybrid(family, chunk=16, budget=24, enable_prefix_caching=caching), random.Random(0)
    requests = ask(engine, prompts_of(LENGTHS if caching else LENGTHS[:6]), NEW)
    while engine.has_unfinished:
        engine.step()
        if chance.random() < 0.3 and engine.scheduler.running:
            engine.scheduler.preempt(chance.choice(engine.scheduler.running))
    assert engine.scheduler.num_preemptions >= 3
    check(family, requests, "preempted")
    check_nothing_is_lost(engine)


def test_twins_wait_for_the_checkpoint_and_start_from_it():
    engine, prompt = hybrid(FAMILY, chunk=32, budget=64), tuple(some_ids(80, 160))
    requests = ask(engine, [prompt] * 3, NEW)
    drain(engine)
    assert check(FAMILY, requests, "twins") == [0, 72, 72], "wait for it, then share it"


def test_a_freed_slot_s_old_state_is_never_seen():
    engine = hybrid(FAMILY, max_num_seqs=2)
    states = engine.runner.pool.states
    states.recurrent_state[:, :] = float("nan")  # slot 0 and what was never written
    states.conv_state[:, :] = float("nan")
    requests = ask(engine, prompts_of(LENGTHS[2:6]), NEW)
    drain(engine)
    check(FAMILY, requests, "in slots full of NaN: zero a slot when it is handed out")


def test_an_abort_in_mid_step_leaves_nothing_behind():
    """The step still writes the aborted request's state; the next owner of the slot must not see it."""
    engine = hybrid(FAMILY, max_num_seqs=1, enable_prefix_caching=False)
    first, second = ask(engine, prompts_of((65, 33)), NEW)
    inner = engine.runner.run

    def abort_while_running(chunks):
        engine.abort(first.id)
        return inner_once(chunks)

    def inner_once(chunks):
        plan = engine.runner.plan
        freed = partial(add_slots, lambda request_id: [1])  # the aborted request's slot, already free
        engine.runner.plan = planner([freed])
        out = inner(chunks)
        engine.runner.run, engine.runner.plan = inner, plan
        return out

    engine.runner.run = abort_while_running
    drain(engine)
    assert first.finish_reason == FinishReason.ABORT
    check(FAMILY, [second], "behind an aborted request")


def test_more_requests_than_slots_wait_their_turn():
    engine = build_engine(
        both(FAMILY)[0],
        backend="reference",
        kv_bytes=6 * state_bytes(both(FAMILY)[0].config.layers, torch.float32) * 2,
        block_size=8,
        kernel="torch",
        checkpoint_interval=32,
        scheduler_config=SchedulerConfig(max_num_seqs=16),
    )
    assert engine.scheduler.manager.coordinator.memory.states.max_reqs == 3
    requests, most = ask(engine, prompts_of((5, 9, 3, 12, 7)), 4), 0
    while engine.has_unfinished:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    assert most == 3, "a state slot is needed beside blocks"
    check(FAMILY, requests, "with three slots")


@pytest.mark.parametrize(
    "budget, want", [(2, Slots(1, 0)), (3, Slots(1, 1)), (9, Slots(4, 4)), (12, Slots(4, 7)), (100, Slots(4, 16))]
)
def test_memory_for_states_is_divided(budget, want):
    assert slots_in_budget(budget * 1000, 1000, max_num_seqs=4) == want


@pytest.mark.parametrize(
    "make",
    [lambda: slots_in_budget(1999, 1000, 4), lambda: hybrid(FAMILY, checkpoint_interval=20)],
    ids=["too little memory for a state", "an interval that is no multiple of the block size"],
)
def test_what_cannot_work_is_refused(make):
    with pytest.raises(UserError):
        make()
