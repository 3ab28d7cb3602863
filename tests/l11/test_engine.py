"""Lesson 11. Every token equals Hugging Face's: batched, in chunks, preempted, behind a checkpoint, beside an abort."""

import random
from functools import partial

import pytest
import torch

from mini_engine.assembly.build import build_engine
from mini_engine.assembly.storage import planner
from mini_engine.base.errors import UserError
from mini_engine.engine.request import FinishReason
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.hybrid.plan import add_slots
from mini_engine.hybrid.sizes import Slots, slots_in_budget
from mini_engine.model.kinds import state_bytes
from tests.l11.models import SELECTED, ask, both, check_nothing_is_lost, drain, first_logits, greedy, hybrid
from tests.support import some_ids

NEW = 12
LENGTHS = (1, 2, 7, 31, 32, 33, 65, 130)  # around blocks of 8, checkpoints at 32 and rounds of 64
FAMILY = "every fourth attends"
each_family = pytest.mark.parametrize("family", SELECTED)
nightly = pytest.mark.nightly


def prompts_of(lengths=LENGTHS):
    return [tuple(some_ids(length, 160, seed=length)) for length in lengths]


def check(family, requests, when):
    for request in requests:
        want = greedy(family, tuple(request.prompt_ids), request.params.max_tokens)
        got = request.output_ids
        first = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
        assert got == want, (
            f"{when}: {len(request.prompt_ids)} prompt tokens, {request.num_cached_tokens} cached, "
            f"{request.num_preemptions} preemptions: the first other token is number {first} ({request.error})"
        )


@each_family
def test_batched_and_then_behind_their_own_checkpoints(family):
    engine, prompts = hybrid(family), prompts_of()
    first = ask(engine, prompts, NEW, "cold")
    drain(engine)
    check(family, first, "batched")
    second = ask(engine, prompts, NEW, "warm")
    drain(engine)
    check(family, second, "behind a checkpoint")
    assert [r.num_cached_tokens for r in second] == [(n - 1) // 8 * 8 for n in LENGTHS], (
        "a prompt that comes again begins at its last whole block"
    )
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


def test_a_pool_that_is_too_small_preempts_and_answers():
    engine = hybrid(FAMILY, num_blocks=24, max_track_slots=3)
    requests = ask(engine, [tuple(some_ids(40, 160, seed=i)) for i in range(4)], 40)
    drain(engine)
    assert engine.scheduler.num_preemptions > 0
    check(FAMILY, requests, "in a small pool")
    check_nothing_is_lost(engine)


@pytest.mark.parametrize("family", [pytest.param("every fourth attends", marks=nightly), "one delta net, last"])
def test_prompts_of_up_to_700_tokens(family):
    engine = hybrid(family, chunk=200, budget=256, checkpoint_interval=64)
    prompts = prompts_of((699, 411, 700))
    for name in ("cold", "warm"):
        requests = ask(engine, prompts, 6, name)
        drain(engine)
        check(family, requests, name)
    assert all(request.num_cached_tokens > 400 for request in requests)


@each_family
def test_without_prefix_caching_nothing_is_kept(family):
    engine = hybrid(family, enable_prefix_caching=False, chunk=33, budget=40)
    for name in ("a", "b"):
        requests = ask(engine, prompts_of(LENGTHS[3:7]), NEW, name)
        drain(engine)
        check(family, requests, name)
        assert not any(request.num_cached_tokens for request in requests)
    assert engine.scheduler.manager.blocks_by_state.cached == 0
    check_nothing_is_lost(engine)


@pytest.mark.parametrize("interval", [pytest.param(8, marks=nightly), 16, 24, pytest.param(32, marks=nightly)])
def test_branches_of_one_prefix(interval):
    """Prompts leave a common beginning inside a block and at its end; the later ones start from the branching point."""
    trunk = tuple(some_ids(50, 160, seed=1))
    prompts = [trunk[:cut] + tuple(some_ids(9, 160, seed=i)) for i, cut in enumerate((50, 50, 48, 50, 33, 33, 33))]
    engine = hybrid(FAMILY, chunk=64, budget=64, checkpoint_interval=interval, max_track_slots=60)
    for i, prompt in enumerate(prompts):
        requests = ask(engine, [prompt], NEW, f"branch {i} ")
        drain(engine)
        check(FAMILY, requests, f"branch {i}, interval {interval}")
        if i in (3, 6):
            assert requests[0].num_cached_tokens == (48 if i == 3 else 32), (
                "the second prompt that leaves the trunk here makes a checkpoint, and the third one finds it"
            )
    check_nothing_is_lost(engine)


def test_a_chat_finds_its_earlier_turns():
    engine, history = hybrid(FAMILY, checkpoint_interval=8), ()
    for turn in range(4):
        history += tuple(some_ids(21, 160, seed=turn))
        [request] = ask(engine, [history], NEW, f"turn {turn} ")
        drain(engine)
        check(FAMILY, [request], f"turn {turn}")
        if turn:
            assert request.num_cached_tokens >= len(history) - 21 - NEW, "the last answer's prompt must be found"
        history += tuple(request.output_ids)


def test_an_answer_is_checkpointed_too():
    """Every interval of the answer: the next turn of a chat does not compute it again."""
    engine = hybrid(FAMILY, checkpoint_interval=16)
    prompt = tuple(some_ids(10, 160))
    [request] = ask(engine, [prompt], 60)
    drain(engine)
    [later] = ask(engine, [prompt + tuple(request.output_ids) + (5,)], NEW, "later ")
    drain(engine)
    assert later.num_cached_tokens == 64
    check(FAMILY, [later], "behind its own answer")


def test_twins_wait_for_the_checkpoint_and_start_from_it():
    engine, prompt = hybrid(FAMILY, chunk=32, budget=64), tuple(some_ids(80, 160))
    requests = ask(engine, [prompt] * 3, NEW)
    drain(engine)
    check(FAMILY, requests, "twins")
    assert [request.num_cached_tokens for request in requests] == [0, 72, 72], "wait for it, then share it"


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


def test_a_prompt_s_own_log_probabilities_are_told():
    engine, prompt = hybrid(FAMILY, chunk=16), some_ids(41, 160)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    told, beside = engine.add_request("told", prompt, params), ask(engine, [prompt], NEW)
    drain(engine)
    scores = first_logits(FAMILY, prompt)[1].log_softmax(-1)
    want = [float(scores[i, token]) for i, token in enumerate(prompt[1:])]
    assert [one.chosen for one in told.prompt_logprobs] == pytest.approx(want, abs=1e-4)
    check(FAMILY, beside, "beside a request that is told its prompt's log probabilities")


def test_a_failed_step_frees_its_slots():
    engine = hybrid(FAMILY)
    requests = ask(engine, prompts_of(LENGTHS[:3]), NEW)
    inner = engine.runner.run

    def fail(chunks):
        inner(chunks)  # half of the layers' states may be those after the step
        engine.runner.run = inner
        raise MemoryError("no memory for the logits")

    engine.runner.run = fail
    drain(engine)
    assert all(request.finish_reason == FinishReason.ERROR for request in requests)
    check_nothing_is_lost(engine)
    again = ask(engine, prompts_of(LENGTHS[:3]), NEW, "again")
    drain(engine)
    check(FAMILY, again, "after a failed step")


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


def test_too_little_memory_for_a_state_is_refused():
    with pytest.raises(UserError):
        slots_in_budget(1999, 1000, 4)


def test_an_interval_that_is_no_multiple_of_the_block_size_is_refused():
    with pytest.raises(UserError):
        hybrid(FAMILY, checkpoint_interval=20)
