"""Lesson 6. An engine in a thread of its own: many readers in other threads, of whom none can hold it up.

Readers hand in jobs and leave; only the thread touches the engine, and takes what was handed in between two steps:

    reader -- job, or "stop that one" --> inbox --> [ engine: step, step, step … ] -- delta --> mailbox --> reader

An abort is therefore honoured within a step. Text is made here as well, because a stop string ends a request.

Waking a reader takes time from the engine, so it is rationed: alone, a reader gets every token as it comes; one of
fifty gets a tenth of a second's tokens at once. First tokens and ends of answers never wait.
"""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mini_engine.engine.answer import AnswerReader, TextDelta
from mini_engine.engine.answers import Answers, Job
from mini_engine.engine.engine import Engine
from mini_engine.engine.mailbox import Mailbox, ring
from mini_engine.engine.request import FinishReason, Request
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.stats import StepStats
from mini_engine.tokenizer import Tokenizer

SECONDS_PER_READER = 0.002  # between two wake-ups of one reader, times the readers that a step has something for

log = logging.getLogger(__name__)


class QueueFull(RuntimeError):
    """Too many requests wait already. Nothing was handed in; come back later."""


class EngineStopped(RuntimeError):
    """The engine's thread has been told to end, and takes no more jobs."""


class Observer:
    """Is told what happens, in the engine's thread. This one does not care; lesson 7's counts."""

    def stepped(self, stats: StepStats) -> None:
        """A step has run."""

    def token(self, seconds: float, first: bool) -> None:
        """An answer got a token, so long after the one before, or after the job was handed in if it is the first."""

    def ended(self, request: Request) -> None:
        """A request has ended; `finish_reason` says why."""


@dataclass(eq=False)
class OpenAnswer:
    """An unfinished answer, in the engine's thread. `latest`: when it was handed in, or got its last token."""

    request: Request
    reader: AnswerReader
    mailbox: Mailbox
    index: int
    latest: float


class EngineWorker:
    """The thread and its inbox. `with EngineWorker(engine, tokenizer) as worker:` starts and ends it.

    Args:
        max_waiting: answers that may be open without running; a job beyond that is refused with QueueFull.
        observer: is told of steps, tokens and ends.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, max_waiting: int = 1024, observer: Observer | None = None
    ) -> None:
        self.engine, self.tokenizer, self.max_waiting = engine, tokenizer, max_waiting
        self.observer = observer or Observer()
        self.answers: dict[str, OpenAnswer] = {}  # the thread's own
        self.num_open = 0
        self._numbers = itertools.count()
        self._inbox: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def __enter__(self) -> "EngineWorker":
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self.engine.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Answers that are open and do not run; those that the thread has not seen yet are among them."""
        return max(0, self.num_open - self.num_running)

    @property
    def is_alive(self) -> bool:
        """The thread runs and takes jobs."""
        return self._thread.is_alive() and not self._stopping

    async def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncIterator[TextDelta]:
        """Answer one prompt, delta by delta. Closing the iterator early aborts the request.

        Raises:
            UserError: the prompt or the params cannot be run. QueueFull, EngineStopped: not now.
        """
        with closing(await self.submit([Job(prompt_ids, params)])) as answers:
            async with aclosing(answers.__aiter__()) as deltas:
                async for _, delta in deltas:
                    yield delta

    def stream_sync(self, prompt_ids: Sequence[int], params: SamplingParams) -> Iterator[TextDelta]:
        """`stream` for a thread without an event loop."""
        with closing(self.submit_sync([Job(prompt_ids, params)])) as answers:
            for _, delta in answers:
                yield delta

    async def submit(self, jobs: Sequence[Job]) -> Answers:
        """Hand in jobs, all of them or none, and wait until the engine has taken them; it answers all at once.

        Raises:
            UserError: one of them cannot be run. QueueFull, EngineStopped: not now. None was taken.
        """
        answers, taken = self._hand_in(jobs, Mailbox(asyncio.get_running_loop()))
        try:
            await asyncio.wrap_future(taken)
        except BaseException:  # a reader that is cancelled here may have been taken all the same
            answers.close()
            raise
        return answers

    def submit_sync(self, jobs: Sequence[Job]) -> Answers:
        """`submit` for a thread without an event loop."""
        answers, taken = self._hand_in(jobs, Mailbox())
        taken.result()
        return answers

    def abort(self, ids: Iterable[str]) -> None:
        """End requests before the next step, and tell who reads them; ids that are not open are no mistake."""
        with self._changed:
            self._inbox.append(partial(self._abort, list(ids)))
            self._changed.notify()

    def close(self) -> None:
        """End the thread after the step that it is in. Answers still open end with an error."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _hand_in(self, jobs: Sequence[Job], mailbox: Mailbox) -> tuple[Answers, Future]:
        taken: Future = Future()
        with self._changed:
            if not self.is_alive:
                raise EngineStopped("the engine does not run, or is being stopped, and takes no requests")
            if self.num_waiting + len(jobs) > self.max_waiting:
                raise QueueFull(
                    f"{self.num_waiting} requests wait already, and at most {self.max_waiting} may; try again soon"
                )
            ids = [f"answer-{next(self._numbers)}" for _ in jobs]
            answers = Answers(ids, mailbox, self.tokenizer, self.abort)
            self.num_open += len(jobs)
            self._inbox.append(partial(self._open, answers, list(jobs), taken, time.perf_counter()))
            self._changed.notify()
        return answers, taken

    # From here on, everything runs in the engine's thread.

    @torch.inference_mode()
    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._inbox or self._stopping or self.engine.has_unfinished)
                commands, self._inbox = self._inbox, []
            for command in commands:
                command()
            if self._stopping:
                self._fail("the engine was stopped before the answer was complete")
                return
            if self.engine.has_unfinished:
                self._step()

    def _open(self, answers: Answers, jobs: Sequence[Job], taken: Future, since: float) -> None:
        """Add all requests, or none and say why."""
        if not taken.set_running_or_notify_cancel():
            self._forget(len(jobs))
            return
        opened = {}
        try:
            for index, (request_id, job) in enumerate(zip(answers.ids, jobs, strict=True)):
                request = self.engine.add_request(request_id, job.prompt_ids, job.params, namespace=job.namespace)
                reader = AnswerReader(request, self.tokenizer)
                opened[request_id] = OpenAnswer(request, reader, answers.mailbox, index, since)
        except Exception as error:
            for request_id in opened:
                self.engine.abort(request_id)
            self._forget(len(jobs))
            taken.set_exception(error)
            return
        self.answers |= opened
        answers.requests = [answer.request for answer in opened.values()]
        taken.set_result(None)

    def _step(self) -> None:
        """One step, and its deltas to their readers. Whatever goes wrong, the thread goes on."""
        try:
            result = self.engine.step()
        except Exception as error:  # not one request's fault: the engine itself is at a loss
            log.exception("the engine failed between two steps; all open requests end with an error")
            self._fail(f"{type(error).__name__}: {error}")
            return
        self._tell(self.observer.stepped, result.stats)
        now = time.perf_counter()
        finished = [request.id for request in result.finished]
        ids = dict.fromkeys([*result.new_tokens, *finished])  # among them may be requests that are not ours
        touched = [self.answers[request_id] for request_id in ids if request_id in self.answers]
        for answer in touched:
            self._deliver(answer, now)
        pace = SECONDS_PER_READER * len(touched)
        ring((mailbox for mailbox in self._mailboxes(touched) if mailbox.is_due(now, pace)), now)

    def _mailboxes(self, touched: Iterable[OpenAnswer]) -> set[Mailbox]:
        """Where something may wait: of this step, or of one before."""
        return {answer.mailbox for answer in (*touched, *self.answers.values())}

    def _deliver(self, answer: OpenAnswer, now: float) -> None:
        first = answer.reader.num_read == 0
        try:
            delta = answer.reader.next_delta()
        except Exception as error:  # this answer's text cannot be made; the others' can
            log.exception("request %s ends with an error", answer.request.id)
            delta = TextDelta("", [], FinishReason.ERROR, f"{type(error).__name__}: {error}")
        if delta.token_ids:
            self._tell(self.observer.token, now - answer.latest, first)
            answer.latest = now
        if delta.finish_reason is not None:
            self._end(answer, delta.finish_reason)
        answer.mailbox.put(answer.index, delta)

    def _end(self, answer: OpenAnswer, reason: FinishReason) -> None:
        self.engine.abort(answer.request.id, reason)  # a stop string ends what the engine would go on with
        del self.answers[answer.request.id]
        self._forget(1)
        self._tell(self.observer.ended, answer.request)

    def _tell(self, note: Callable[..., None], *what: Any) -> None:
        """An observer that fails is no reason for readers to wait for ever."""
        try:
            note(*what)
        except Exception:
            log.exception("the observer failed")

    def _abort(self, ids: Iterable[str]) -> None:
        open_ids = [request_id for request_id in ids if request_id in self.answers]
        self._close(open_ids, TextDelta("", [], FinishReason.ABORT))

    def _fail(self, error: str) -> None:
        """End all that is open, and tell the readers."""
        self._close(list(self.answers), TextDelta("", [], FinishReason.ERROR, error))

    def _close(self, ids: Iterable[str], last: TextDelta) -> None:
        """End these answers with this delta."""
        ended = [self.answers[request_id] for request_id in ids]
        for answer in ended:
            self._end(answer, last.finish_reason)
            answer.mailbox.put(answer.index, last)
        ring({answer.mailbox for answer in ended}, time.perf_counter())

    def _forget(self, count: int) -> None:
        with self._changed:
            self.num_open -= count
