"""Lesson 6. The engine thread: many readers, fast, slow and gone, none of which holds up another."""

import asyncio
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest
import torch

from mini_engine.assembly.llm import LLM
from mini_engine.base.errors import UserError
from mini_engine.engine import worker as worker_module
from mini_engine.engine.answer import AnswerReader, TextDelta
from mini_engine.engine.engine import Engine
from mini_engine.engine.jobs import Job
from mini_engine.engine.mailbox import Mailbox, wake_readers
from mini_engine.engine.open_answer import OpenAnswer, Times
from mini_engine.engine.request import FinishReason, Request
from mini_engine.engine.sampled import TokenLogprobs
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.engine.worker import EngineStopped, EngineWorker, Observer
from mini_engine.families.qwen3 import load_model
from mini_engine.pocket import POCKET_DIR
from mini_engine.text.tokenizer import Tokenizer
from tests.support import hf_greedy, write_checkpoint

PATIENCE = 60.0


@cache
def tokenizer():
    return Tokenizer(POCKET_DIR)


@cache
def models():
    with tempfile.TemporaryDirectory(prefix="kv-course-", ignore_cleanup_errors=True) as folder:
        path = write_checkpoint(Path(folder), vocab_size=len(tokenizer().token_bytes), max_position_embeddings=512)
        from transformers import AutoModelForCausalLM

        return load_model(path), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@cache
def greedy(prompt_ids, max_new_tokens):
    return hf_greedy(models()[1], list(prompt_ids), max_new_tokens)


class Recorder(Observer):
    """Records its callbacks."""

    def __init__(self):
        self.steps, self.tokens, self.ends, self.times = 0, [], [], []

    def stepped(self, stats):
        self.steps += 1

    def token(self, seconds, first):
        self.tokens.append((seconds, first))

    def ended(self, request):
        self.ends.append((request.id, request.finish_reason))

    def timed(self, times):
        self.times.append(times)


@pytest.fixture
def worker():
    with make_worker() as worker:
        yield worker


def make_worker(num_blocks=257, max_waiting=64, **limits):
    config = SchedulerConfig(**limits)
    engine = Engine.for_model(models()[0], num_blocks=num_blocks, block_size=4, scheduler_config=config)
    return EngineWorker(engine, tokenizer(), max_waiting, Recorder())


def params(max_tokens=8, **more):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def wait_until(holds, what):
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, f"timed out, waiting until {what}"
        time.sleep(0.002)


def is_idle(worker):
    wait_until(lambda: worker.num_open == 0, "no answer is open")
    held = worker.engine.scheduler.manager.blocks_by_state.held
    assert held == 0, f"{held} blocks are still held, but no request is left"
    return True


def collect(deltas):
    deltas = list(deltas)
    return "".join(d.text for d in deltas), [t for d in deltas for t in d.token_ids], deltas[-1].finish_reason


async def collect_async(deltas):
    return collect([delta async for delta in deltas])


def in_time(call):
    """What `call` returns in a thread of its own; None if it waits forever, which has to fail the test."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return found[0] if found else None


# Mailboxes


def test_waiting_deltas_are_merged_for_a_slow_reader():
    box = Mailbox()
    box.put(0, TextDelta("a", [1]))
    box.put(1, TextDelta("x", [7]))
    box.put(0, TextDelta("b", [2], FinishReason.LENGTH))
    assert box.take() == [(0, TextDelta("ab", [1, 2], FinishReason.LENGTH)), (1, TextDelta("x", [7]))]
    assert box.take() == [], "taken deltas must be gone"


def test_a_merged_delta_has_the_numbers_of_both():
    one, two, of_prompt = (TokenLogprobs(value, []) for value in (-1.0, -2.0, -3.0))
    box = Mailbox()
    box.put(0, TextDelta("a", [1], None, None, (one,), (of_prompt,), 16))
    box.put(0, TextDelta("b", [2], FinishReason.LENGTH, None, (two,)))
    assert box.take() == [(0, TextDelta("ab", [1, 2], FinishReason.LENGTH, None, (one, two), (of_prompt,), 16))]


def test_a_mailbox_is_due_when_its_time_has_come_or_an_answer_has_ended():
    box = Mailbox()
    assert not box.is_due(0.0, 0.1), "nothing has arrived"
    box.put(0, TextDelta("a", [1]))
    assert box.is_due(0.0, 0.1), "the first token must be delivered at once"
    wake_readers([box], 0.0)
    assert box.ready.is_set() and not box.is_due(0.05, 0.1) and box.is_due(0.1, 0.1)
    box.put(0, TextDelta("b", [2], FinishReason.STOP))
    assert box.is_due(0.05, 0.1), "an answer has ended: its reader must be woken at once"


def test_ringing_for_a_closed_loop_does_nothing():
    loop = asyncio.new_event_loop()
    box = Mailbox(loop)
    loop.close()
    wake_readers([box], 0.0)


# Streams


def test_many_readers_in_threads_and_loops_share_steps(worker):
    async def read_many():
        return await asyncio.gather(*(collect_async(worker.stream([number, 9], params(24))) for number in range(4)))

    with ThreadPoolExecutor(4) as pool:
        in_threads = pool.map(lambda number: collect(worker.stream_sync([number, 9], params(24))), range(4, 8))
        found = [token_ids for _, token_ids, _ in (*asyncio.run(read_many()), *in_threads)]
    assert found == [greedy((number, 9), 24) for number in range(8)]
    assert worker.observer.steps < 8 * 24, "the requests were answered one after the other, not in shared steps"
    assert is_idle(worker)


def test_a_stop_string_ends_the_request_within_its_step(worker):
    text = tokenizer().decode(greedy((5, 6, 7), 30))
    shown, token_ids, reason = collect(worker.stream_sync([5, 6, 7], params(30, stop=text[6:10])))
    assert shown == text[: text.index(text[6:10])] and reason == FinishReason.STOP
    assert len(token_ids) < 30 and len(worker.observer.tokens) == len(token_ids), (
        "the engine went on after the stop string"
    )
    assert is_idle(worker)


def test_a_request_is_aborted_when_its_reader_leaves(worker):
    with closing(worker.stream_sync([5, 6, 7], params(480))) as deltas:
        next(deltas)
    assert is_idle(worker)
    assert [reason for _, reason in worker.observer.ends] == [FinishReason.ABORT]


def test_a_request_is_aborted_when_its_reader_is_cancelled_as_the_job_is_accepted(worker):
    async def leave():
        task = asyncio.create_task(worker.submit([Job([5, 6, 7], params(480))]))
        await asyncio.sleep(0)
        wait_until(lambda: worker.answers, "the job is accepted")  # the loop, blocked here, does not know it yet
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    assert is_idle(worker)
    assert [reason for _, reason in worker.observer.ends] == [FinishReason.ABORT], "the answer was computed to its end"


def test_jobs_submitted_together_are_accepted_all_or_none(worker):
    with pytest.raises(UserError, match="99999"):
        worker.submit_sync([Job([1], params()), Job([99999], params())])
    assert is_idle(worker) and worker.observer.ends == []
    answers = worker.submit_sync([Job([1, 2], params()), Job([3, 4], params())])
    found = {0: [], 1: []}
    for index, delta in answers:
        found[index] += delta.token_ids
    assert found == {0: greedy((1, 2), 8), 1: greedy((3, 4), 8)}
    assert [job.prompt_ids for job in answers.jobs] == [[1, 2], [3, 4]]


@pytest.mark.parametrize("reads_late", [False, True])
def test_deltas_carry_the_log_probabilities_that_the_engine_computed(worker, reads_late):
    """Speculation or not, at a stop string or at its limit, read token by token or all at once."""
    prompt, wanted = list(range(300, 320)), params(24, logprobs=2, prompt_logprobs=1)
    whole = LLM.for_engine(make_worker().engine, tokenizer()).generate([prompt], wanted, progress=False)[0]
    cut = params(24, logprobs=2, prompt_logprobs=1, stop=whole.text[8:10])
    (expected,) = LLM.for_engine(make_worker().engine, tokenizer()).generate([prompt], cut, progress=False)
    assert expected.finish_reason == FinishReason.STOP and len(expected.token_ids) < 24
    for asked, want in ((wanted, whole), (cut, expected)):
        answers = worker.submit_sync([Job(prompt, asked)])
        if reads_late:
            wait_until(lambda: worker.num_open == 0, "the answer is complete")
        deltas = [delta for _, delta in answers]
        assert not reads_late or len(deltas) == 1, "what a late reader finds is merged"
        assert [token for delta in deltas for token in delta.token_ids] == want.token_ids
        assert [one for delta in deltas for one in delta.logprobs] == want.logprobs
        assert [one for delta in deltas for one in delta.prompt_logprobs] == want.prompt_logprobs


def test_the_seconds_of_an_answer_add_up():
    """In the queue, to the first token, to the end; each from the moment at which the one before ended."""
    answer = OpenAnswer(Request("x", [1, 2, 3], params()), None, None, 0, submitted=10.0)
    assert answer.times(13.0) == Times(3.0, 0.0, 0.0, 3.0), "it has only waited"
    answer.note_step(11.0)
    assert answer.times(13.0) == Times(3.0, 0.0, 0.0, 3.0), "a step that computed nothing for it"
    answer.request.num_computed_tokens = 2
    answer.note_step(12.0)
    answer.note_step(12.5)
    assert answer.times(13.0) == Times(2.0, 1.0, 0.0, 3.0), "its first step began at 12"
    answer.first = 14.0
    assert answer.times(20.0) == Times(2.0, 2.0, 6.0, 10.0)


def test_an_answer_leaves_the_queue_with_the_first_chunk_of_its_prompt():
    worker = make_worker(max_num_seqs=1, max_num_batched_tokens=4, chunked_prefill_size=4)
    for name in ("computed", "waits"):
        request = worker.engine.add_request(name, [1] * 12, params())
        worker.answers[name] = OpenAnswer(request, AnswerReader(request, worker.tokenizer), Mailbox(), 0, 0.0)
    worker._step()
    assert worker.answers["computed"].started is not None, "its first 4 tokens have KV, though it has no token yet"
    assert worker.answers["waits"].started is None


# Trouble


def test_an_answer_whose_text_cannot_be_made_fails_alone(worker):
    other = worker.submit_sync([Job([1, 2], params(30))])
    broken = worker.submit_sync([Job([5, 6, 7], params(400))])
    answer = worker.answers[broken.ids[0]]
    answer.reader.answer.push = lambda token_id: 1 / 0
    *_, (_, last) = broken
    assert last.finish_reason == FinishReason.ERROR and "division" in last.error
    assert [token for _, delta in other for token in delta.token_ids] == greedy((1, 2), 30)
    assert is_idle(worker)


def on_fire(*_):
    raise RuntimeError("the books are on fire")


def read_in_threads(worker, prompts, max_tokens=300):
    """Return a dictionary that gets the last delta of each prompt's answer, and the threads that read them."""
    found = {}

    def read(number, answers):
        found[number] = list(answers)[-1][1]

    opened = [worker.submit_sync([Job(prompt, params(max_tokens))]) for prompt in prompts]
    threads = [threading.Thread(target=read, args=item, daemon=True) for item in enumerate(opened)]
    for thread in threads:
        thread.start()
    return found, threads


def told(found, threads):
    """Return why each answer ended."""
    for thread in threads:
        thread.join(PATIENCE)
    assert len(found) == len(threads), "a reader waits forever: tell every mailbox, whatever the clean-up raises"
    return [found[number].finish_reason for number in sorted(found)]


@pytest.mark.reference
@pytest.mark.parametrize("place", ["end", "conclude"])
@pytest.mark.parametrize("fails_first", ["run", "schedule"])
def test_every_reader_is_told_though_the_clean_up_fails_too(worker, place, fails_first, monkeypatch):
    engine = worker.engine
    reading = read_in_threads(worker, [[1, 2], [5, 6, 7], [8, 9]])
    wait_until(lambda: worker.num_running == 3, "all requests run")
    owner = engine if place == "conclude" else engine.scheduler.manager.coordinator
    monkeypatch.setattr(owner, place, on_fire)
    monkeypatch.setattr(engine.runner if fails_first == "run" else engine.scheduler, fails_first, on_fire)
    assert told(*reading) == [FinishReason.ERROR] * 3
    wait_until(lambda: "the books are on fire" in worker.fault, "the worker says why it takes no more requests")
    assert not worker.is_alive and worker.num_open == 0
    with pytest.raises(EngineStopped):
        worker.submit_sync([Job([1, 2], params())])
    assert worker.close(PATIENCE) is True


@pytest.mark.reference
@pytest.mark.parametrize("put", [1, 2], ids=["once", "always"])
def test_a_mailbox_that_fails_does_not_hold_up_another_reader(worker, put):
    (found, threads), broken = read_in_threads(worker, [[1, 2]], 30), worker.submit_sync([Job([5, 6, 7], params(400))])
    request, left = worker.answers[broken.ids[0]].request, [put]
    real = broken.mailbox.put

    def fails(index, delta):
        if left[0] > 0:
            left[0] -= put == 1
            raise RuntimeError("the mailbox is full")
        real(index, delta)

    broken.mailbox.put = fails
    assert told(found, threads) == [FinishReason.LENGTH]
    wait_until(lambda: request.is_finished, "the answer that cannot be handed over ends")
    assert request.finish_reason == FinishReason.ERROR and "mailbox" in request.error
    assert is_idle(worker) and worker.is_alive
    if put == 1:
        *_, (_, last) = broken
        assert last.finish_reason == FinishReason.ERROR and "mailbox" in last.error


@pytest.mark.reference
def test_a_request_whose_reader_cannot_be_made_is_not_left_behind(worker, monkeypatch):
    monkeypatch.setattr("mini_engine.engine.worker.AnswerReader", on_fire)
    with pytest.raises(RuntimeError, match="on fire"):
        worker.submit_sync([Job([1, 2], params()), Job([3, 4], params())])
    assert is_idle(worker) and not worker.engine.has_unfinished


@pytest.mark.reference
def test_a_job_that_is_handed_in_just_before_the_end_is_told_so(worker):
    gate, found = threading.Event(), []
    worker.observer.ended = lambda request: gate.wait(PATIENCE)
    worker.submit_sync([Job([1, 2], params(400))]).close()  # the engine's thread ends it, and waits at the gate
    wait_until(lambda: worker.num_open == 0, "the answer has ended")
    late = threading.Thread(target=lambda: found.append(list(worker.submit_sync([Job([3, 4], params())]))), daemon=True)
    late.start()
    wait_until(lambda: worker.num_open == 1, "another job is handed in")
    assert worker.close(0.01) is False
    gate.set()
    late.join(PATIENCE)
    assert found and found[0][-1][1].finish_reason == FinishReason.ERROR, "it was accepted, and is never answered"


@pytest.mark.parametrize("what", ["stepped", "token", "ended", "timed"])
def test_a_failing_observer_does_not_hold_up_a_reader(worker, what, monkeypatch):
    monkeypatch.setattr(worker.observer, what, lambda *_: 1 / 0)
    seen = in_time(lambda: list(worker.stream_sync([1, 2], params())))
    assert worker.is_alive and seen and seen[-1].finish_reason == FinishReason.LENGTH
    assert is_idle(worker)


def test_requests_added_to_the_engine_directly_are_left_alone():
    worker = make_worker()
    other = worker.engine.add_request("another's", [5, 6, 7], params(4))
    with worker:
        seen = in_time(lambda: list(worker.stream_sync([1, 2], params())))
        assert worker.is_alive and seen and collect(seen)[1] == greedy((1, 2), 8)
        assert other.output_ids == greedy((5, 6, 7), 4)


@pytest.mark.parametrize("end", ["abort", "close"])
def test_a_reader_does_not_wait_forever_when_another_thread_ends_its_answer(worker, end):
    answers, seen = worker.submit_sync([Job([5, 6, 7], params(480))]), []
    reader = threading.Thread(target=lambda: seen.append(list(answers)), daemon=True)
    reader.start()
    wait_until(lambda: worker.num_running == 1, "the request runs")
    worker.abort(answers.ids) if end == "abort" else answers.close()
    reader.join(PATIENCE)
    assert seen, "the answer has ended, but its reader waits forever"
    assert end == "close" or seen[0][-1][1].finish_reason == FinishReason.ABORT
    assert is_idle(worker)


def test_a_worker_that_was_never_started_takes_no_jobs():
    with pytest.raises(EngineStopped, match="not running"):
        make_worker().submit_sync([Job([1], params())])


def test_closing_ends_open_answers_with_an_error_and_takes_no_more_jobs():
    worker = make_worker()
    with worker:
        answers = worker.submit_sync([Job([5, 6, 7], params(480))])
    *_, (_, last) = answers
    assert last.finish_reason == FinishReason.ERROR and "stopped" in last.error
    assert is_idle(worker) and not worker.is_alive
    with pytest.raises(EngineStopped):
        worker.submit_sync([Job([1], params())])
    worker.close()


def test_a_step_that_does_not_return_is_reported_and_close_gives_up_in_time():
    worker = make_worker()
    worker.stuck_seconds = 0.0  # any step that has not returned
    gate, step = threading.Event(), worker.engine.step
    worker.engine.step = lambda: gate.wait() and step()
    with worker:
        try:
            worker.submit_sync([Job([5, 6, 7], params(1))])
            wait_until(lambda: worker.stuck, "a step that runs for longer than `stuck_seconds` is reported")
            assert "seconds" in worker.stuck and worker.is_alive
            assert worker.close(0.01) is False, "close must come back from a thread that does not"
        finally:
            gate.set()
        assert worker.close(PATIENCE) is True and worker.stuck == "", "and a step that has returned is not reported"


def test_the_engine_runs_in_inference_mode_in_one_thread(worker):
    run, seen = worker.engine.runner.run, set()

    def watched(chunks):
        seen.add((threading.current_thread().name, torch.is_inference_mode_enabled()))
        return run(chunks)

    worker.engine.runner.run = watched
    collect(worker.stream_sync([1, 2], params()))
    assert seen == {("engine", True)}


def test_clients_that_were_answered_in_one_step_begin_together_again(worker, monkeypatch):
    steps, others, waits = [], [], []

    def hand_in(prompt):  # all in the engine thread
        others.append(worker._hand_in([Job(prompt, params(8))], Mailbox())[0])

    def burst(*_):
        waits.append(len(steps))
        hand_in([7])

    def stepped(stats):
        steps.append(stats.prefill_tokens)
        if waits and len(steps) == waits[0] + 3:
            hand_in([8])

    monkeypatch.setattr(worker_module, "wait_for_burst", burst)
    monkeypatch.setattr(worker.observer, "stepped", stepped)
    for jobs in ([Job([5], params(2)), Job([6], params(2))], [Job([4], params(2))]):
        with closing(worker.submit_sync(jobs)) as answers:
            list(answers)
    for other in others:
        list(other)
    assert waits == [2], "before which steps the engine waited: only an idle one does, after several answers ended"
    assert [count for count in steps if count] == [2, 2, 1], "prompts in each step that began some"


@pytest.mark.skipif(not list((Path(torch.__file__).parent / "lib").glob("libgomp*")), reason="another OpenMP")
def test_the_team_that_loaded_the_model_is_gone_before_the_engine_thread_makes_its_own():
    engine = Engine.for_model(models()[0], kv_bytes=2**20)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.ones(2**20).exp_()  # a parallel loop, as those that load a model: it leaves a thread behind
        before = running_threads()
        with EngineWorker(engine, tokenizer()):
            deadline = time.monotonic() + PATIENCE
            while len(before & running_threads()) == len(before) and time.monotonic() < deadline:
                time.sleep(0.01)
            left = len(before & running_threads())
            assert left < len(before), "the loading thread's team still waits beside the engine's"
    finally:
        torch.set_num_threads(threads)


def running_threads():
    return set(Path("/proc/self/task").iterdir())
