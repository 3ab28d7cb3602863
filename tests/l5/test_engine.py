"""Lesson 5. The engine around a stub model: every way a request can end, with nothing left behind."""

import logging
import threading
from types import SimpleNamespace

import pytest
import torch

from mini_engine.base.errors import EngineDead, UserError
from mini_engine.engine.engine import Engine, default_kv_bytes
from mini_engine.engine.request import Ending, FinishReason
from mini_engine.engine.sampled import Sampled
from mini_engine.engine.scheduler import Chunk, Scheduler
from mini_engine.kv.manager import BlocksByState
from tests.l5.helpers import CountingManager, request_of
from tests.stubs import EOS, VOCAB, check_books, check_empty, drain, expected_answer, greedy, stub_config, stub_engine
from tests.support import refused

LENGTHS = {"a": 5, "b": 11, "c": 2, "d": 30}


def with_requests(**limits):
    """Return an engine with four requests of different lengths, and their prompts."""
    engine = stub_engine(**limits)
    prompts = {name: [(i * 7 + n) % (VOCAB - 1) + 1 for i in range(n)] for name, n in LENGTHS.items()}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, greedy(12, ignore_eos=True))
    return engine, prompts


# --- one step, with hand-made parts


class FixedScheduler(Scheduler):
    """A scheduler with a fixed schedule that logs its calls. The first request ends with the step."""

    def __init__(self, requests, chunks):
        super().__init__(CountingManager(usable=8))
        self.running, self.chunks, self.log, self.num_preemptions = list(requests), chunks, [], 5
        self.requests = {request.id: request for request in [*requests, request_of(3, name="waits")]}
        self.waiting = [self.requests["waits"]]
        for request in requests:
            self.manager.holding(request, 4)

    def schedule(self):
        self.num_preemptions += 2
        return self.chunks

    def update(self, chunks, sampled):
        self.log.append(("update", chunks, sampled))
        self.finish(self.chunks[0].request, FinishReason.STOP)
        return {chunk.request.id: s for chunk, s in zip([c for c in chunks if c.samples], sampled, strict=True)}

    def fail(self, requests, error):
        requests = list(requests)
        self.log.append(("fail", requests, error))
        super().fail(requests, error)


def fixed(run):
    """Return an engine whose scheduler has a decode, a prompt's last chunk and a chunk in mid-prompt."""
    requests = [request_of(4, name="a", computed=4, outputs=[9]), request_of(6, name="b"), request_of(9, name="c")]
    chunks = [Chunk(request, *span, [1, 2]) for request, span in zip(requests, [(4, 5), (0, 6), (0, 4)], strict=True)]
    scheduler = FixedScheduler(requests, chunks)
    return Engine(stub_config(), scheduler, SimpleNamespace(run=run, fault="")), scheduler, requests


def names(requests):
    return [request.id for request in requests]


def one_hot(*tokens):
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).float()


@pytest.mark.task(7)
def test_a_step_returns_new_tokens_finished_requests_and_statistics():
    engine, scheduler, _ = fixed(lambda chunks: one_hot(7, 8))
    result = engine.step()
    assert result.new_tokens == {"a": Sampled(7, None), "b": Sampled(8, None)}, "what update returns: id to new token"
    assert names(result.finished) == ["a"], "a ended with this step, b and c go on"
    assert result.finished[0].finish_reason == "stop"
    assert scheduler.log == [("update", scheduler.chunks, [Sampled(7, None), Sampled(8, None)])], (
        "update is called once, with the step's chunks and one token for each chunk that samples"
    )


@pytest.mark.task(7)
def test_a_step_counts_queues_tokens_by_kind_and_blocks_by_state():
    stats = fixed(lambda chunks: one_hot(7, 8))[0].step().stats
    assert (stats.prefill_tokens, stats.decode_tokens) == (10, 1), (
        "prompts have 6 and 4 tokens in this step, and a decodes one: count them before update, which changes them"
    )
    assert (stats.num_running, stats.num_waiting) == (2, 1), "after the step: a has ended, b and c run, one waits"
    assert stats.num_preempted == 2, "scheduler.num_preemptions was 5 before this step and is 7 now"
    assert stats.blocks == BlocksByState(free=6, held=2, cached=0), "after the step: a's block is free again"


@pytest.mark.task(7)
def test_a_failed_step_ends_its_requests_with_the_error(caplog):
    error = RuntimeError("the device is on fire")

    def burn(chunks):
        raise error

    engine, scheduler, requests = fixed(burn)
    result = engine.step()
    assert scheduler.log == [("fail", requests, error)], (
        "scheduler.fail ends all requests of the step with the error, and update is not called"
    )
    assert names(result.finished) == ["a", "b", "c"], "requests that end with an error have finished too"
    assert result.new_tokens == {}, "a failed step has no tokens"
    assert [r.id for r in scheduler.waiting] == ["waits"], "a request that was not in the step goes on"
    assert "on fire" in caplog.text, (
        "log the exception (log.exception): clients see one line, the operator the traceback"
    )


@pytest.mark.task(7)
def test_a_step_that_fails_in_update_is_a_failed_step(caplog):
    caplog.set_level(logging.CRITICAL)
    engine, scheduler, requests = fixed(lambda chunks: one_hot(7, 8))
    error = KeyError("unknown block")

    def broken(chunks, sampled):
        raise error

    scheduler.update = broken
    result = engine.step()
    assert scheduler.log == [("fail", requests, error)], "whatever update raises is a failed step too"
    assert names(result.finished) == ["a", "b", "c"], "requests that end with an error have finished too"
    assert result.new_tokens == {}, "a failed step has no tokens"


@pytest.mark.task(7)
def test_a_failed_step_has_computed_no_tokens(caplog):
    caplog.set_level(logging.CRITICAL)
    stats = fixed(lambda chunks: 1 / 0)[0].step().stats
    assert (stats.prefill_tokens, stats.decode_tokens) == (0, 0), "a failed step computed nothing: it counts no tokens"
    assert (stats.num_running, stats.num_waiting) == (0, 1), "its three requests have ended"


@pytest.mark.task(7)
def test_a_request_aborted_during_the_step_is_not_among_the_finished():
    def run(chunks):
        engine.abort("c")
        return one_hot(7, 8)

    engine, _, _ = fixed(run)
    assert names(engine.step().finished) == ["a"], (
        "c was aborted while the step ran. Its caller knows; to others it would look as if an answer had ended"
    )


@pytest.mark.task(7)
@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_in_a_step_is_not_a_failed_step(signal):
    def stop(chunks):
        raise signal

    engine, scheduler, _ = fixed(stop)
    try:
        engine.step()
        went_through = False
    except signal:
        went_through = True
    why = "the requests are not to blame: catch Exception, and let everything else through"
    assert went_through, f"step raised nothing where {signal.__name__} is expected; {why}"
    assert scheduler.log == [], why


@pytest.mark.task(7)
def test_a_dead_engine_is_not_a_failed_step():
    def die(chunks):
        raise EngineDead("block 3 is lost")

    engine, scheduler, _ = fixed(die)
    all_requests = list(scheduler.requests.values())
    try:
        engine.step()
        went_through = False
    except EngineDead:
        went_through = True
    assert went_through, (
        "step raised nothing where EngineDead is expected: no step can run any more, and the caller has to know. "
        "Let it through before you catch Exception"
    )
    assert {r.id: r.error for r in all_requests} == dict.fromkeys(
        ("a", "b", "c", "waits"), "EngineDead: block 3 is lost"
    ), "one_at_a_time ends every request, the waiting one too: keep the decorator"


@pytest.mark.task(7)
def test_a_step_without_chunks_does_not_call_the_model():
    engine, scheduler, _ = fixed(lambda chunks: 1 / 0)
    scheduler.chunks = []
    scheduler.update = lambda chunks, sampled: {}
    assert engine.step().new_tokens == {}
    assert scheduler.log == [], "nothing was scheduled: do not call the model with no chunks"


# --- whole runs


@pytest.mark.parametrize("usable", [11, 14, 60])
def test_each_answer_equals_that_of_the_request_alone_even_in_a_pool_too_small_for_all(usable):
    engine, prompts = with_requests(usable=usable)
    finished = drain(engine)
    for name, prompt in prompts.items():
        assert finished[name].output_ids == expected_answer(prompt, 12, ()), f"{name}: its answer is not its own"
    assert (engine.scheduler.num_preemptions > 0) == (usable < 60), "this tests nothing"
    check_empty(engine)


# --- requests that are refused


@pytest.mark.parametrize(
    "prompt, params, place, values",
    [
        ([], {}, {}, ""),
        ([1] * 60, {"max_tokens": 8}, {}, "17 4 16"),
        ([1] * 10, {"max_tokens": 100}, {}, "110 100"),
        ([1, VOCAB], {}, {}, f"{VOCAB}"),
        ([1, -1], {}, {}, "-1"),
        ([1], {"stop_token_ids": [99]}, {}, "99"),
        ([1], {}, {"namespace": ["tenant"]}, "namespace ['tenant']"),
        ([1], {}, {"priority": None}, "priority None"),
        ([1], {}, {"priority": float("nan")}, "priority nan"),
    ],
)
def test_a_request_that_can_never_run_is_refused_on_arrival_and_others_run(prompt, params, place, values):
    engine = stub_engine(usable=16, max_positions=100, policy="priority")
    engine.add_request("a", [1, 2, 3], greedy(5, ignore_eos=True))
    engine.step()
    with refused(UserError, values):
        engine.add_request("b", prompt, greedy(**{"max_tokens": 4} | params), **place)
    assert set(engine.scheduler.requests) == {"a"}
    assert drain(engine)["a"].output_ids == expected_answer([1, 2, 3], 5, ())
    check_empty(engine)


def test_a_concurrent_second_step_is_refused_and_the_first_goes_on():
    engine, met = stub_engine(), []
    engine.add_request("a", [1, 2, 3], greedy(5, ignore_eos=True))

    def other_thread():
        try:
            engine.step()
        except RuntimeError as error:
            met.append(str(error))

    def during():
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()

    engine.runner.during = during
    assert drain(engine)["a"].output_ids == expected_answer([1, 2, 3], 5, ())
    assert met, "concurrent steps would compute one request twice"
    check_empty(engine)


def test_a_request_that_fills_the_pool_to_the_last_slot_runs():
    engine = stub_engine(usable=4, block_size=4)
    engine.add_request("a", [1] * 9, greedy(8, ignore_eos=True))
    assert drain(engine)["a"].output_ids == expected_answer([1] * 9, 8, ())
    check_empty(engine)


# --- ends


def first_token_is(token):
    """Return a prompt whose answer begins with `token`."""
    return next([1, i, j] for i in range(VOCAB) for j in range(VOCAB) if expected_answer([1, i, j], 1) == [token])


def test_an_end_token_can_be_the_first_token():
    engine = stub_engine()
    engine.add_request("a", first_token_is(EOS), greedy(9))
    engine.add_request("b", first_token_is(EOS), greedy(1))
    for request in drain(engine).values():
        assert request.output_ids == [EOS], "the end token ends the answer and is part of it"
        assert request.finish_reason == "stop", "the model chose its end token: the engine must know which those are"
    check_empty(engine)


def test_before_min_tokens_no_end_token_is_chosen():
    engine = stub_engine()
    engine.add_request("a", first_token_is(EOS), greedy(9, min_tokens=4))
    request = drain(engine)["a"]
    assert len(request.output_ids) >= 4 and EOS not in request.output_ids[:4]


def test_a_stop_token_of_one_request_does_not_end_another():
    engine, prompts = with_requests()
    free = expected_answer(prompts["a"], 12, ())
    engine.add_request("e", prompts["a"], greedy(12, ignore_eos=True, stop_token_ids=[free[3]]))
    finished = drain(engine)
    assert finished["a"].output_ids == free
    assert finished["e"].output_ids == free[: free.index(free[3]) + 1] and finished["e"].finish_reason == "stop"


# --- abort


def state_of(engine, name, state):
    """Step until request `name` is waiting, mid-chunk, decoding or finished."""
    request = engine.scheduler.requests[name]
    for _ in range(200):
        mid = request in engine.scheduler.running and 0 < request.num_computed_tokens < len(request.prompt_ids)
        now = {
            "waiting": request in engine.scheduler.waiting,
            "mid-chunk": mid,
            "decoding": len(request.output_ids) > 2 and not request.is_finished,
            "finished": request.is_finished,
            "preempted": request.num_preemptions > 0 and request in engine.scheduler.waiting,
        }
        if now[state]:
            return request
        engine.step()
    raise AssertionError(f"{name} was never {state}")


@pytest.mark.parametrize("state, usable", [("waiting", 30), ("mid-chunk", 30), ("decoding", 30), ("preempted", 14)])
def test_an_abort_frees_everything_and_leaves_other_requests_alone(state, usable):
    engine, prompts = with_requests(usable=usable, max_num_batched_tokens=8)
    request = state_of(engine, "d", state)
    assert engine.abort("d") is True
    assert "d" not in engine.scheduler.manager.tables, f"a request aborted while {state} still holds blocks"
    check_books(engine)
    assert engine.abort("d") is False, "a second abort finds no request"
    finished = drain(engine)
    assert "d" not in finished and request.finish_reason == "abort"
    for other in "abc":
        assert finished[other].output_ids == expected_answer(prompts[other], 12, ()), (
            f"{other} was touched by the abort"
        )
    check_empty(engine)


# --- failures


def explode():
    raise RuntimeError("out of memory")


def test_an_exception_in_a_step_releases_everything_and_the_engine_goes_on(caplog):
    caplog.set_level(logging.CRITICAL)
    engine, prompts = with_requests(usable=14, max_num_batched_tokens=8)
    state_of(engine, "b", "decoding")
    engine.runner.during = explode
    failed = engine.step().finished
    spared = set(engine.scheduler.requests)
    assert spared and {r.id for r in failed} == set(LENGTHS) - spared
    assert {(r.finish_reason, r.error) for r in failed} == {("error", "RuntimeError: out of memory")}
    check_books(engine)
    finished = drain(engine)
    assert {name: finished[name].output_ids for name in spared} == {
        name: expected_answer(prompts[name], 12, ()) for name in spared
    }, "requests outside the failed step must not be affected"
    engine.add_request("late", [4, 5], greedy(3, ignore_eos=True))
    assert drain(engine)["late"].output_ids == expected_answer([4, 5], 3, ())
    check_empty(engine)


def never_released(*_):
    raise RuntimeError("the books do not balance")


@pytest.mark.reference
@pytest.mark.parametrize("end", ["a failed step", "abort", "conclude", "the end of an answer", "preemption"])
def test_an_engine_whose_requests_cannot_be_released_ends_them_all_and_runs_no_more(end, monkeypatch, caplog):
    engine, _ = with_requests(usable=14, max_num_batched_tokens=8)
    request, manager = state_of(engine, "a", "decoding"), engine.scheduler.manager
    requests = list(engine.scheduler.requests.values())
    monkeypatch.setattr(manager.coordinator, "end", never_released)
    if end == "a failed step":
        engine.runner.during = explode
        assert {r.error for r in engine.step().finished} == {"RuntimeError: out of memory"}, "the first error"
    elif end == "abort":
        assert engine.abort("a") is True and request.finish_reason == "abort"
    elif end == "conclude":
        engine.conclude(request, Ending(FinishReason.STOP))
        assert request.finish_reason == "stop"
    elif end == "preemption":
        monkeypatch.setattr(engine.scheduler, "make_room", lambda: engine.scheduler.preempt(request))
    with pytest.raises(EngineDead, match="the books do not balance"):
        for _ in range(20):
            engine.step()
    assert all(r.is_finished for r in requests) and not engine.has_unfinished and not manager.tables
    assert "the books do not balance" in engine.fault and "Traceback" in caplog.text
    monkeypatch.undo()
    late = engine.add_request("late", [4, 5], greedy(3))
    with pytest.raises(EngineDead):
        engine.step()
    assert late.error == f"EngineDead: {manager.fault}", "whatever has leaked, no step may use it"


@pytest.mark.reference
def test_a_request_that_cannot_be_announced_is_not_left_behind():
    engine, _ = with_requests()
    engine.scheduler.manager.coordinator.request_added = never_released
    with pytest.raises(RuntimeError):
        engine.add_request("new", [4, 5], greedy(3))
    assert sorted(engine.scheduler.requests) == sorted(LENGTHS)


# --- the pool


def test_the_pool_is_sized_from_a_memory_budget():
    from tests.support import both

    model = both("two, tied, wide heads")[0]
    per_token = model.config.kv_bytes_per_token(torch.float32)
    engine = Engine.for_model(model, kv_bytes=100 * 16 * per_token + 5, kernel="reference")
    assert engine.scheduler.manager.num_usable_blocks == 99, "the budget pays for the null block too"
    assert engine.runner.pool.bytes == 100 * 16 * per_token
    assert default_kv_bytes(torch.device("cpu")) == 2**30
