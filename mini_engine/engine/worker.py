"""Lesson 6. Runs the engine in its own thread, for many readers in other threads and event loops.

Readers only submit and abort; the engine thread alone touches the engine, and reads its inbox between two steps:

    reader -- job or abort --> inbox --> [ engine: step, step, step … ] -- delta --> mailbox --> reader

So an abort takes effect within one step. Text is made in this thread too, because a stop string ends a request.

Waking a reader takes time from the engine, so wake-ups are rationed: a single reader gets every token as it is made;
each of fifty gets the tokens of a tenth of a second at once. First tokens and ends of answers never wait.
"""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, closing
from functools import partial
from typing import Any, NamedTuple

import torch

from mini_engine.base.errors import EngineDead
from mini_engine.base.openmp import release_threads
from mini_engine.engine.answer import AnswerReader, TextDelta
from mini_engine.engine.burst import wait_for_burst
from mini_engine.engine.engine import Engine
from mini_engine.engine.jobs import Answers, Job
from mini_engine.engine.mailbox import Mailbox, wake_readers
from mini_engine.engine.open_answer import OpenAnswer, Times
from mini_engine.engine.request import Ending, FinishReason, Request
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.stats import StepStats
from mini_engine.engine.turns import give_place
from mini_engine.text.tokenizer import Tokenizer

STUCK_SECONDS = 60.0  # a step that runs for longer is reported
SECONDS_PER_READER = 0.002  # between two wake-ups of a reader, times the number of answers that a step advances

log = logging.getLogger(__name__)


class QueueFull(RuntimeError):
    """Too many requests are waiting. Nothing was submitted; try again later."""


class EngineStopped(RuntimeError):
    """The engine thread is not running or is shutting down, and takes no jobs."""


class ModelLimits(NamedTuple):
    """The limits of the engine behind a server.

    max_model_len: positions of the model.
    max_tokens: the most tokens, prompt and answer together, that both the model and the pool can take.
    num_blocks, block_size: blocks of the pool, and slots in each.
    sampling: the checkpoint's suggestions for requests that leave sampling parameters out.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    max_tokens: int
    num_blocks: int
    block_size: int
    sampling: Mapping[str, Any]


class Observer:
    """Callbacks from the engine thread. This one does nothing; lesson 7's collects metrics."""

    def stepped(self, stats: StepStats) -> None:
        """Note that a step has run."""

    def token(self, seconds: float, first: bool) -> None:
        """Note that an answer got a token, `seconds` after its previous one, or after submission if `first`."""

    def ended(self, request: Request) -> None:
        """Note that a request has ended; its `finish_reason` says why."""

    def timed(self, times: Times) -> None:
        """Note how an answer that has ended spent its time."""


class EngineWorker:
    """The engine thread and its inbox. `with EngineWorker(engine, tokenizer) as worker:` starts and ends it.

    Args:
        max_waiting: the most answers that may wait; jobs beyond that are refused with QueueFull.
        observer: notified of steps, tokens and ends of answers.
        stuck_seconds: how long a step may run before `stuck` reports it.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        max_waiting: int = 1024,
        observer: Observer | None = None,
        stuck_seconds: float = STUCK_SECONDS,
    ) -> None:
        self.engine, self.tokenizer, self.max_waiting = engine, tokenizer, max_waiting
        self.observer = observer or Observer()
        self.stuck_seconds = stuck_seconds
        self.answers: dict[str, OpenAnswer] = {}  # touched by the engine thread only
        self.num_open = 0
        self._numbers = itertools.count()
        self._inbox: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._broken = ""
        self._step_began: float | None = None
        self._step_seconds, self._ended_together = 0.0, 0  # of the latest step; answers that ended in it
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def __enter__(self) -> "EngineWorker":
        release_threads()  # this thread loaded the model, and its idle team would slow down the engine thread's
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    @property
    def limits(self) -> ModelLimits:
        """The limits of the model and the pool."""
        config, manager = self.engine.config, self.engine.scheduler.manager
        ends, pool = tuple(config.eos_token_ids), (manager.num_usable_blocks, manager.block_size)
        lengths = config.max_model_len, self.engine.max_request_tokens
        return ModelLimits(config.vocab_size, ends, *lengths, *pool, config.sampling)

    @property
    def num_running(self) -> int:
        """The number of requests that hold blocks."""
        return len(self.engine.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """The number of open answers that are not running, including those still in the inbox."""
        return max(0, self.num_open - self.num_running)

    @property
    def is_alive(self) -> bool:
        """True if the thread is running and takes jobs."""
        return self._thread.is_alive() and not self._stopping and not self.fault

    @property
    def fault(self) -> str:
        """The reason the engine cannot run another step, or this thread cannot use it; empty otherwise."""
        return self.engine.fault or self._broken

    @property
    def stuck(self) -> str:
        """A sentence for the operator if a step has been running for too long; empty otherwise."""
        began = self._step_began  # read once: the engine thread may set it meanwhile
        seconds = 0.0 if began is None else time.monotonic() - began
        return f"a step has been running for {seconds:.0f} seconds" if seconds > self.stuck_seconds else ""

    async def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncIterator[TextDelta]:
        """Answer one prompt, delta by delta. Closing the iterator early aborts the request.

        Raises:
            UserError: the prompt or the params are invalid. QueueFull, EngineStopped: not now.
        """
        with closing(await self.submit([Job(prompt_ids, params)])) as answers:
            async with aclosing(answers.__aiter__()) as deltas:
                async for _, delta in deltas:
                    yield delta

    def stream_sync(self, prompt_ids: Sequence[int], params: SamplingParams) -> Iterator[TextDelta]:
        """Do the same as `stream`, in a thread without an event loop."""
        with closing(self.submit_sync([Job(prompt_ids, params)])) as answers:
            for _, delta in answers:
                yield delta

    async def submit(self, jobs: Sequence[Job]) -> Answers:
        """Submit jobs, all or none, and wait until the engine has accepted them. They are answered concurrently.

        Raises:
            UserError: one of them is invalid. QueueFull, EngineStopped: not now. In each case none was accepted.
        """
        answers, taken = self._hand_in(jobs, Mailbox(asyncio.get_running_loop()))
        try:
            await asyncio.wrap_future(taken)
        except BaseException:  # cancelled here, but the jobs may have been accepted
            answers.close()
            raise
        return answers

    def submit_sync(self, jobs: Sequence[Job]) -> Answers:
        """Do the same as `submit`, in a thread without an event loop."""
        answers, taken = self._hand_in(jobs, Mailbox())
        taken.result()
        return answers

    def abort(self, ids: Iterable[str]) -> None:
        """Abort requests before the next step and notify their readers. Ids that are not open are ignored."""
        self._order(partial(self._abort, list(ids)))

    async def close_session(self, session: Hashable, namespace: Hashable = None) -> bool:
        """Forget a conversation before the next step (lesson 20). Its turns that wait or run go on.

        Returns:
            False if the namespace has no session of this name.

        Raises:
            EngineStopped: the engine takes no orders any more.
        """
        closed: Future[bool] = Future()
        with self._changed:
            if not self.is_alive:
                raise EngineStopped("the engine is not running or is shutting down; its sessions end with it")
            self._order(partial(self._close_session, closed, session, namespace))
        return await asyncio.wrap_future(closed)

    def end_all(self, error: str) -> None:
        """End every open answer with this error, before the next step."""
        self._order(partial(self._fail, error))

    def close(self, seconds: float | None = None) -> bool:
        """End the thread after the current step. Answers still open end with an error.

        Args:
            seconds: how long to wait for that; None waits as long as it takes.

        Returns:
            whether the thread has ended.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _hand_in(self, jobs: Sequence[Job], mailbox: Mailbox) -> tuple[Answers, Future]:
        taken: Future = Future()
        with self._changed:
            if not self.is_alive:
                raise EngineStopped("the engine is not running or is shutting down; it takes no requests")
            if self.num_waiting + len(jobs) > self.max_waiting:
                raise QueueFull(
                    f"{self.num_waiting} requests are waiting already, the limit is {self.max_waiting}; try again soon"
                )
            ids = [f"answer-{next(self._numbers)}" for _ in jobs]
            answers = Answers(list(jobs), ids, mailbox, self.tokenizer, self.abort)
            self.num_open += len(jobs)
            self._order(partial(self._open, answers, taken, time.perf_counter()))
        return answers, taken

    def _order(self, command: Callable[[], None]) -> None:
        """Have the engine thread carry out a command before its next step."""
        with self._changed:
            self._inbox.append(command)
            self._changed.notify()

    # From here on, everything runs in the engine thread.

    @torch.inference_mode()
    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._inbox or self._stopping or self.engine.has_unfinished)
                if self._ended_together > 1 and not self.engine.has_unfinished:
                    wait_for_burst(self._changed, lambda: (len(self._inbox), self._stopping), self._step_seconds)
                commands, self._inbox = self._inbox, []
                is_last = self._stopping  # later jobs are refused; earlier ones are all among the commands
            for command in commands:
                command()
            if is_last:
                self._fail(self._broken or "the engine was stopped before the answer was complete")
                return
            if self.engine.has_unfinished:
                self._step()

    def _open(self, answers: Answers, taken: Future, since: float) -> None:
        """Add all requests, or add none and set the error."""
        jobs = answers.jobs
        if not taken.set_running_or_notify_cancel():
            self._forget(len(jobs))
            return
        added, opened = [], {}
        try:
            for index, (request_id, job) in enumerate(zip(answers.ids, jobs, strict=True)):
                hints = job.priority, job.namespace, job.session
                request = self.engine.add_request(request_id, job.prompt_ids, job.params, *hints)
                added.append(request_id)
                reader = AnswerReader(request, self.tokenizer)
                opened[request_id] = OpenAnswer(request, reader, answers.mailbox, index, since)
        except Exception as error:
            for request_id in added:
                self.engine.abort(request_id)
            self._forget(len(jobs))
            taken.set_exception(error)
            return
        self.answers |= opened
        taken.set_result(None)

    def _close_session(self, closed: "Future[bool]", session: Hashable, namespace: Hashable) -> None:
        if not closed.set_running_or_notify_cancel():
            return
        try:
            closed.set_result(self.engine.close_session(session, namespace))
        except Exception as error:
            closed.set_exception(error)

    def _step(self) -> None:
        """Run one step and deliver its deltas. The thread survives any error."""
        self._step_began, began = time.monotonic(), time.perf_counter()
        try:
            num_given = give_place(self.engine.scheduler)
            result = self.engine.step()
        except EngineDead as error:
            self._fail(str(error))
            return
        except Exception as error:  # not one request's fault: the engine itself failed
            log.exception("the engine failed between two steps; all open requests end with an error")
            self._fail(f"{type(error).__name__}: {error}")
            return
        finally:
            self._step_began = None
        for request in (*self.engine.scheduler.running, *result.finished):  # those still waiting have no new step
            if answer := self.answers.get(request.id):
                answer.note_step(began)
        self._step_seconds, self._ended_together = time.perf_counter() - began, len(result.finished)
        stats = result.stats._replace(num_preempted=result.stats.num_preempted + num_given)
        self._tell(self.observer.stepped, stats)
        now = time.perf_counter()
        finished = [request.id for request in result.finished]
        ids = dict.fromkeys([*result.new_tokens, *finished])  # the engine may also run requests of other callers
        touched = [self.answers[request_id] for request_id in ids if request_id in self.answers]
        for answer in touched:
            self._deliver(answer, now)
        pace = SECONDS_PER_READER * len(touched)
        boxes = {answer.mailbox for answer in (*touched, *self.answers.values())}  # deltas of earlier steps may wait
        self._tell(wake_readers, [box for box in boxes if box.is_due(now, pace)], now)

    def _deliver(self, answer: OpenAnswer, now: float) -> None:
        """Put the answer's next delta into its mailbox. If that fails, only this answer ends."""
        try:
            self._hand_over(answer, now)
        except Exception as error:
            log.exception("request %s ends with an error", answer.request.id)
            self._close([answer], FinishReason.ERROR, f"{type(error).__name__}: {error}")

    def _hand_over(self, answer: OpenAnswer, now: float) -> None:
        first = answer.reader.num_read == 0
        delta = answer.reader.next_delta()
        if delta.token_ids:
            self._tell(self.observer.token, now - answer.latest, first)
            answer.latest = now
            answer.first = now if first else answer.first
        if delta.finish_reason is not None:
            answer.reader.drop_unread()
            self._end(answer, Ending(delta.finish_reason, delta.error))
        answer.mailbox.put(answer.index, delta)

    def _end(self, answer: OpenAnswer, ending: Ending) -> None:
        """End an answer, unless it has ended. If the engine fails to, this thread ends too, and `fault` says why.

        The engine ends a request even if its clean-up raises; after any other exception its state is unknown.
        """
        if answer.request.id not in self.answers:
            return
        try:
            self.engine.conclude(answer.request, ending)  # after a stop string the engine would go on
        except Exception as error:
            log.exception("request %s could not be ended; the engine cannot go on", answer.request.id)
            why = f"a request could not be ended ({type(error).__name__}: {error}); start the engine again"
            with self._changed:
                self._broken, self._stopping = self._broken or why, True
        del self.answers[answer.request.id]
        self._forget(1)
        self._tell(self.observer.ended, answer.request)
        self._tell(self.observer.timed, answer.times(time.perf_counter()))

    def _tell(self, note: Callable[..., None], *what: Any) -> None:
        """Call an observer or a mailbox. If it fails, log that and go on: other readers must not wait because of it."""
        try:
            note(*what)
        except Exception:
            log.exception("the observer or a reader's mailbox failed")

    def _abort(self, ids: Iterable[str]) -> None:
        self._close([self.answers[request_id] for request_id in ids if request_id in self.answers], FinishReason.ABORT)

    def _fail(self, error: str) -> None:
        """End every open answer with this error."""
        self._close(list(self.answers.values()), FinishReason.ERROR, error)

    def _close(self, ended: Sequence[OpenAnswer], reason: FinishReason, error: str | None = None) -> None:
        """End these answers for this reason, without further tokens. Their readers are notified, whatever fails."""
        for answer in ended:
            self._end(answer, Ending(reason, error))
            self._tell(answer.mailbox.put, answer.index, TextDelta("", [], reason, error))
        self._tell(wake_readers, {answer.mailbox for answer in ended}, time.perf_counter())

    def _forget(self, count: int) -> None:
        with self._changed:
            self.num_open -= count
