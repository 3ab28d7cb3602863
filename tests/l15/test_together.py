"""Lesson 15. Windows with what other lessons add: guesses, log probabilities, grammars, tenants, promises."""

import asyncio
import json
import random

import pytest
import torch

from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Scheduler
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.gpu.graphs import no_graph
from mini_engine.speculation.options import Speculation
from mini_engine.speculation.speculator import Speculator
from tests.l14.toys import Always
from tests.l15.pocket import (
    LENGTHS,
    PROMPTS,
    ask,
    check_answers,
    check_nothing_is_lost,
    directory,
    drain,
    greedy,
    hugging_face,
    windows,
)

pytestmark = pytest.mark.reference  # no task is about this
TIERS = {"kv_host_bytes": 2**28, "kv_always": True}
IN_CHUNKS = SchedulerConfig(chunked_prefill_size=16, watermark=0.0)
WHOLE = [(length - 1) // 8 * 8 for length in LENGTHS]
LONG = PROMPTS[-1]


# ---------------------------------------------------------------- guesses


def guessing(right=0.7, num_tokens=24, **options):
    """Return an engine whose drafter knows Hugging Face's answers and is wrong now and then."""
    limits, speculation = options.pop("scheduler_config", SchedulerConfig()), Speculation(5)

    def guess(request, count):
        at, answer = len(request.output_ids), greedy(tuple(request.prompt_ids), num_tokens)
        known = answer[at : at + count]
        return [token if random.Random(at + i).random() < right else 1 for i, token in enumerate(known)]

    built = windows(scheduler_config=limits, speculate=speculation, **options)
    scheduler = Scheduler(built.scheduler.manager, limits)
    return Engine(built.config, scheduler, built.runner, Speculator(speculation, Always(guess)))


def spoken(engine, when, between=lambda: None):
    """Run all prompts; return how many tokens they found, and how many guesses were made and stood."""
    requests, drafted, accepted = ask(engine, max_tokens=24, name=when), 0, 0
    while engine.has_unfinished:
        stats = engine.step().stats
        drafted, accepted = drafted + stats.num_drafted, accepted + stats.num_accepted
        between()
    return check_answers(requests, when, 24), drafted, accepted


@pytest.mark.parametrize(
    "options",
    [
        {},
        TIERS,
        pytest.param({"enable_prefix_caching": False}, marks=pytest.mark.nightly),
        pytest.param({"scheduler_config": IN_CHUNKS, "num_blocks": 60}, marks=pytest.mark.nightly),
        pytest.param({"block_size": 1, "num_blocks": 1500}, marks=pytest.mark.nightly),
    ],
    ids=["cached", "tiers", "uncached", "tight", "blocks of 1"],
)
def test_guesses_that_are_taken_back_leave_no_trace_in_a_window(options):
    engine = guessing(**options)
    for when in ("cold", "warm"):
        _, drafted, accepted = spoken(engine, when)
        assert drafted > accepted > 0, "this test wants guesses of both kinds"
    check_nothing_is_lost(engine)


def test_guesses_beside_preemptions():
    engine, chance = guessing(), random.Random(0)

    def preempt():
        if chance.random() < 0.5 and engine.scheduler.running:
            engine.scheduler.preempt(chance.choice(engine.scheduler.running))

    spoken(engine, "preempted", preempt)
    assert engine.scheduler.num_preemptions >= 3
    check_nothing_is_lost(engine)


# ---------------------------------------------------------------- log probabilities


@torch.inference_mode()
def log_probs(ids):
    return hugging_face()(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def test_log_probabilities_behind_a_cached_window_are_hugging_faces():
    engine = windows()
    for found in (0, WHOLE[-1]):
        [request] = ask(engine, [LONG], logprobs=2)
        drain(engine)
        assert check_answers([request], "with logprobs") == [found]
        theirs = log_probs([*LONG, *request.output_ids])[len(LONG) - 1 : -1]
        expected = theirs.gather(1, torch.tensor(request.output_ids)[:, None])[:, 0]
        got = torch.tensor([one.chosen for one in request.logprobs])
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_log_probabilities_of_a_prompt_are_computed_from_its_first_token():
    engine = windows(scheduler_config=IN_CHUNKS)
    ask(engine, [LONG])
    drain(engine)
    [request] = ask(engine, [LONG], prompt_logprobs=0)
    drain(engine)
    assert check_answers([request], "with prompt_logprobs") == [0], "what is cached has no logits"
    expected = log_probs(list(LONG))[:-1].gather(1, torch.tensor(LONG[1:])[:, None])[:, 0]
    got = torch.tensor([one.chosen for one in request.prompt_logprobs])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    check_nothing_is_lost(engine)


# ---------------------------------------------------------------- who shares, who waits, who leaves


@pytest.mark.parametrize("options", [{}, TIERS], ids=["tree", "tiers"])
def test_a_namespace_sees_its_own_windows_only(options):
    engine, found = windows(**options), []
    for turn, namespace in enumerate(("a", "b", "a", "b", None)):
        if turn == 2 and options:
            engine.scheduler.manager.coordinator.clear()
        params = SamplingParams(temperature=0, max_tokens=12)
        request = engine.add_request(str(turn), list(LONG), params, namespace=namespace)
        drain(engine)
        found += check_answers([request], f"namespace {namespace}")
    assert found == [0, 0, WHOLE[-1], WHOLE[-1], 0]
    check_nothing_is_lost(engine)


def test_promised_answers_are_never_preempted():
    limits = SchedulerConfig(reserve_answers=True, chunked_prefill_size=16)
    engine, most = windows(num_blocks=60, scheduler_config=limits), 0
    requests = ask(engine, max_tokens=40)
    while engine.has_unfinished:
        most = max(most, engine.step().stats.num_running)
    check_answers(requests, "promised", 40)
    assert engine.scheduler.num_preemptions == 0 and most >= 2, "a window's promise is small: two fit at once"
    check_nothing_is_lost(engine)


@pytest.mark.parametrize(
    "options",
    [{}, {"enable_prefix_caching": False}, TIERS, {"capture": no_graph}],
    ids=["", "uncached", "tiers", "padded"],
)
def test_a_pool_that_is_too_small_preempts_and_changes_no_token(options):
    engine = windows(num_blocks=51, scheduler_config=IN_CHUNKS, **options)
    requests = ask(engine, max_tokens=40)
    drain(engine)
    check_answers(requests, "preempted", 40)
    assert engine.scheduler.num_preemptions > 0, "the pool was to be too small for all of them"
    check_nothing_is_lost(engine)


@pytest.mark.parametrize("options", [{}, TIERS | {"speculate": 3}], ids=["plain", "tiers and guesses"])
def test_aborts_in_the_middle_leave_nothing_behind(options):
    engine, chance = windows(scheduler_config=IN_CHUNKS, **options), random.Random(3)
    requests = ask(engine, PROMPTS * 3)
    while engine.has_unfinished:
        engine.step()
        if chance.random() < 0.3 and engine.scheduler.requests:
            engine.abort(chance.choice(list(engine.scheduler.requests)))
    whole = [request for request in requests if request.finish_reason in ("length", "stop")]
    check_answers(whole, "beside aborts")
    assert 0 < len(whole) < len(requests)
    check_nothing_is_lost(engine)


# ---------------------------------------------------------------- grammars, and a replica


def test_a_grammar_holds_with_guesses_and_behind_a_cached_window():
    pytest.importorskip("llguidance")
    from mini_engine.grammars.compiler import GrammarCompiler
    from mini_engine.grammars.output_forms import OutputForm
    from mini_engine.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(directory())
    compiler = GrammarCompiler(tokenizer, len(tokenizer.token_bytes), (0,))
    schema = {"type": "array", "minItems": 3, "maxItems": 3, "items": {"type": "integer", "maximum": 999}}
    grammar = compiler.compile_sync(OutputForm(schema))
    prompt, answers = tokenizer.encode("Three numbers, as a list: [1, 2, 3], [4, 5, 6], [7, 8, 9]. " * 3), []
    for options in ({}, {"speculate": 4}):
        engine = windows(**options)
        for turn in range(2):
            [request] = ask(engine, [prompt], 40, name=str(turn), grammar=grammar)
            while engine.has_unfinished:
                engine.step()
                engine.conclude(request, request.ending(stopped=False))
            assert request.num_cached_tokens == turn * ((len(prompt) - 1) // 8 * 8)
            answers.append(request.output_ids)
        check_nothing_is_lost(engine)
    assert answers == answers[:1] * 4, "guesses and cached windows change no token"
    assert len(json.loads(tokenizer.decode(answers[0]))) == 3


def test_a_replica_answers_as_its_engine_does():
    pytest.importorskip("fastapi", reason="needs the extra 'server'")
    from mini_engine.distributed.replicas.replica import Replica
    from mini_engine.engine.jobs import Job
    from tests.l13.replicas import options

    replica = Replica(options("--model", "pocket-windows", "--dtype", "float32"), max_waiting=8, name="0")
    job = Job(list(LONG), SamplingParams(temperature=0, max_tokens=12))

    async def answered():
        tokens = []
        async for item in replica.answer([job], []):
            assert item is None or isinstance(item, tuple), item
            tokens += item[1].token_ids if item else []
        return tokens

    try:
        assert asyncio.run(answered()) == asyncio.run(answered()) == greedy(LONG)
    finally:
        replica.worker.close()
