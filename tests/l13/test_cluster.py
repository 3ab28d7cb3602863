"""Lesson 13. The server's side of replicas, with replicas in this process: what is sent, retried, aborted, reported."""

import asyncio
import functools
import pickle
import threading
import time
from contextlib import aclosing
from dataclasses import replace

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'server'")

from mini_engine.base.errors import UserError
from mini_engine.distributed.replicas.wire import FormGrammar
from mini_engine.distributed.routing.keys import block_keys
from mini_engine.distributed.routing.retry import ReplicaLost
from mini_engine.engine.answer import TextDelta
from mini_engine.engine.grammar import ANYTHING
from mini_engine.engine.jobs import Job
from mini_engine.engine.mailbox import merge
from mini_engine.engine.request import FinishReason
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.worker import EngineStopped, QueueFull
from mini_engine.grammars.output_forms import OutputForm
from tests.l13.replicas import GREEDY, PROMPT, cluster


def in_loop(test):
    """Run an asynchronous test in a loop of its own."""

    @functools.wraps(test)
    def run(*args, **fixtures):
        asyncio.run(test(*args, **fixtures))

    return run


async def read_whole(answers):
    """Read all answers. Return each as one delta."""
    whole = [TextDelta("", []) for _ in answers.jobs]
    async for index, delta in answers:
        whole[index] = merge(whole[index], delta)
    return whole


async def read(answers):
    """Read all answers: tokens, reason and error of each."""
    whole = await read_whole(answers)
    return [delta.token_ids for delta in whole], [(delta.finish_reason, delta.error) for delta in whole]


def idle(replica) -> bool:
    """Whether no request is open and no block held."""
    return not replica.worker.num_open and not replica.worker.engine.scheduler.manager.blocks_by_state.held


def num_aborted(replica) -> int:
    """How many requests the replica has aborted so far."""
    return int(replica.metrics.aborts._value.get())


async def until(is_done) -> None:
    async with asyncio.timeout(60):
        while not is_done():
            await asyncio.sleep(0.01)


async def until_idle(replica) -> None:
    await until(lambda: idle(replica))


def test_a_replica_whose_step_does_not_return_is_not_well(replica):
    """Ray Serve asks, and starts another one in its place."""
    worker = replica.worker
    gate, step, limit = threading.Event(), worker.engine.step, worker.stuck_seconds
    replica.check_health()
    worker.engine.step, worker.stuck_seconds = lambda: gate.wait() and step(), 0.0  # any step that has not returned
    try:
        answers = worker.submit_sync([Job(PROMPT, replace(GREEDY, max_tokens=1))])
        deadline = time.monotonic() + 60
        while not worker.stuck and time.monotonic() < deadline:
            time.sleep(0.001)
        with pytest.raises(EngineStopped, match="step"):
            replica.check_health()
    finally:
        gate.set()
        worker.engine.step, worker.stuck_seconds = step, limit
    list(answers)
    asyncio.run(until_idle(replica))
    replica.check_health()


# ---------------------------------------------------------------- what travels


def test_parameters_are_the_same_on_the_other_side():
    form = OutputForm(schema={"type": "object"})
    for params in (SamplingParams(stop="x", logit_bias={5: 1.0}), SamplingParams(grammar=FormGrammar(form))):
        assert pickle.loads(pickle.dumps(params)) == params
    assert pickle.loads(pickle.dumps(GREEDY)).grammar is ANYTHING, "the sampler tells rows without a grammar by this"


# ---------------------------------------------------------------- answers


@in_loop
async def test_answers_over_a_replica_are_those_of_the_engine(replica, expected):
    jobs = [Job(PROMPT, replace(GREEDY, logprobs=1, prompt_logprobs=0)), Job(PROMPT[:20], GREEDY)]
    answers = await cluster(replica).submit(jobs)
    first, second = await read_whole(answers)
    assert first.token_ids == expected and len(first.logprobs) == 12 and len(first.prompt_logprobs) == 39
    assert len(second.token_ids) == 12 and second.logprobs == second.prompt_logprobs == ()
    assert {(delta.finish_reason, delta.error) for delta in (first, second)} == {(FinishReason.LENGTH, None)}
    here = await read_whole(await replica.worker.submit(jobs))
    assert [delta._replace(num_cached_tokens=0) for delta in (first, second)] == [
        delta._replace(num_cached_tokens=0) for delta in here
    ], "a replica's answers are those of its engine, log probabilities and all"


@in_loop
async def test_what_was_found_is_reported_to_the_server_and_to_the_router(replica):
    prompt = [9] * 40
    for found in (0, 32):
        answers = await cluster(replica).submit([Job(prompt, GREEDY)])
        (whole,) = await read_whole(answers)
        assert whole.num_cached_tokens == found
    reports = replica.record_routing_stats()["reports"][-2:]
    assert [report.num_found for report in reports] == [0, 2], "in blocks"
    assert reports[1].number == reports[0].number + 1
    assert reports[0].keys == block_keys(prompt, None, 16)


@pytest.mark.parametrize("job", [Job([99999], GREEDY), Job([], GREEDY), Job([1], replace(GREEDY, max_tokens=9999))])
@in_loop
async def test_a_refused_job_is_refused_as_without_replicas_and_none_was_accepted(replica, job):
    with pytest.raises(UserError) as caught:
        await replica.worker.submit([job])
    with pytest.raises(UserError) as here:
        await cluster(replica).submit([Job([1], GREEDY), job])
    assert str(here.value) == str(caught.value)
    await until_idle(replica)


@in_loop
async def test_a_full_replica_refuses(replica):
    with pytest.raises(QueueFull):
        await cluster(replica).submit([Job([1], GREEDY)] * 9)


@in_loop
async def test_closing_answers_aborts_them_and_frees_their_blocks(replica):
    answers = await cluster(replica).submit([Job(PROMPT, replace(GREEDY, max_tokens=500))])
    async for _ in answers:
        break
    before = num_aborted(replica)
    answers.close()
    await until_idle(replica)
    assert num_aborted(replica) == before + 1, "the replica has computed an answer that nobody reads"


@in_loop
async def test_ending_all_answers_tells_their_readers_why(replica):
    ours = cluster(replica)
    answers = await ours.submit([Job(PROMPT, replace(GREEDY, max_tokens=500))] * 2)
    ours.end_all("the server is shutting down")
    _, ends = await read(answers)
    assert ends == [(FinishReason.ERROR, "the server is shutting down")] * 2
    await until_idle(replica)
    await until(lambda: not ours.open)  # the answers' own tasks end a moment later


# ---------------------------------------------------------------- lost replicas


def losing(replica, num_parts: int, losses: int):
    """An `ask` whose replica is lost after so many parts, the first `losses` times."""
    left = [losses]

    async def ask(jobs, keys):
        seen = 0
        async with aclosing(replica.answer(jobs, keys)) as items:
            async for item in items:
                if left[0] and item is not None and seen == num_parts:
                    left[0] -= 1
                    raise ReplicaLost("the replica that was answering has ended")
                yield item
                seen += item is not None

    return ask, left


@in_loop
async def test_a_replica_lost_before_the_first_token_goes_unnoticed(replica, expected):
    ask, left = losing(replica, num_parts=0, losses=2)
    tokens, ends = await read(await cluster(replica, ask).submit([Job(PROMPT, GREEDY)]))
    assert (tokens, ends, left) == ([expected], [(FinishReason.LENGTH, None)], [0])


@in_loop
async def test_a_replica_lost_after_it_ends_the_answer_with_an_error(replica, expected):
    ask, _ = losing(replica, num_parts=1, losses=1)
    tokens, ends = await read(await cluster(replica, ask).submit([Job(PROMPT, GREEDY)]))
    assert tokens[0] and tokens[0] == expected[: len(tokens[0])], "a token came twice, or from a second answer"
    assert len(tokens[0]) < 12 and ends[0][0] == FinishReason.ERROR and "replica" in ends[0][1]
    await until_idle(replica)


@in_loop
async def test_a_replica_whose_engine_has_ended_is_as_good_as_lost(replica, expected):
    """A rank that ends takes its engine along; until Ray replaces the replica, it refuses what it is sent."""
    left = [2]

    async def ask(jobs, keys):
        if left[0]:
            left[0] -= 1
            yield EngineStopped("rank 1 of 2 has ended")
            return
        async with aclosing(replica.answer(jobs, keys)) as items:
            async for item in items:
                yield item

    tokens, ends = await read(await cluster(replica, ask).submit([Job(PROMPT, GREEDY)]))
    assert (tokens, ends, left) == ([expected], [(FinishReason.LENGTH, None)], [0])


@in_loop
async def test_an_answer_with_no_replica_left_is_refused(replica):
    async def ask(jobs, keys):
        raise ReplicaLost("the replica that was answering has ended")
        yield

    with pytest.raises(EngineStopped):
        await cluster(replica, ask).submit([Job(PROMPT, GREEDY)])


def test_a_schema_is_refused_before_it_is_sent_to_a_replica():
    deep = {"type": "integer"}
    for _ in range(900):
        deep = {"type": "object", "properties": {"x": deep}}
    with pytest.raises(UserError) as refused:
        FormGrammar(OutputForm(deep))
    assert refused.value.param == "response_format", "pickling what is nested so deeply would fail with a traceback"
    small = {"type": "object", "properties": {"x": {"type": "integer"}}}
    assert pickle.loads(pickle.dumps(FormGrammar(OutputForm(small)))).form.schema == small
