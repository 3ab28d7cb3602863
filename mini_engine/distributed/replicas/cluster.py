"""Lesson 13. The replicas behind one interface: like lesson 6's EngineWorker, it takes jobs from lesson 7's server.

    routes -- jobs --> Cluster -- ask --> a replica of the router's choice
           <- Answers -- mailbox <-- deltas --

If a replica is lost before its first delta, another one takes over, and the reader does not notice.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterable, Sequence
from contextlib import aclosing

from mini_engine.distributed.routing.keys import block_keys
from mini_engine.distributed.routing.retry import ReplicaLost, with_retries
from mini_engine.engine.answer import TextDelta
from mini_engine.engine.jobs import Answers, Job
from mini_engine.engine.mailbox import Mailbox, wake_readers
from mini_engine.engine.request import FinishReason
from mini_engine.engine.worker import EngineStopped, ModelLimits
from mini_engine.text.tokenizer import Tokenizer

ACCEPT_SECONDS = 60.0  # for a replica to take a request; if none is alive, one may be starting

Item = tuple[int, TextDelta] | Exception | None
Ask = Callable[[Sequence[Job], Sequence[bytes]], AsyncGenerator[Item, None]]
CloseSession = Callable[[Hashable, Hashable], Awaitable[bool]]


class ReplicaStopped(EngineStopped):
    """No replica has taken the request: those asked have ended, or none is ready. Retry soon."""


class OpenRequest:
    """Jobs sent to a replica together, and their answers so far.

    Attributes:
        accepted: done once a replica has accepted the jobs, or refused them.
    """

    def __init__(self, jobs: Sequence[Job], keys: Sequence[bytes], number: int, tokenizer: Tokenizer) -> None:
        self.jobs, self.keys = jobs, keys
        self.accepted = asyncio.get_running_loop().create_future()
        self.mailbox = Mailbox(asyncio.get_running_loop())
        names = [f"request-{number}-{index}" for index in range(len(jobs))]
        self.answers = Answers(jobs, names, self.mailbox, tokenizer, self.cancel)
        self.unfinished = set(range(len(jobs)))
        self.reading: asyncio.Task[None]

    def cancel(self, names: Iterable[str] = ()) -> None:
        """Stop reading; the replica aborts the unfinished answers. All answers of a request end together."""
        self.reading.cancel()

    async def read(self, ask: Ask) -> None:
        """Send the jobs and deliver deltas until all answers have ended or the task is cancelled."""
        try:
            async with aclosing(with_retries(lambda: self.attempt(ask))) as deltas:
                async for index, delta in deltas:
                    self.put(index, delta)
                    wake_readers([self.mailbox], time.perf_counter())
            self.fail("the replica stopped before the answer was complete")
        except ReplicaLost as error:
            self.refuse(ReplicaStopped(f"{error}, and so did those that were asked instead"))
            self.fail(str(error))
        except Exception as error:
            self.refuse(error)
            self.fail(f"{type(error).__name__}: {error}")

    async def attempt(self, ask: Ask) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Make one attempt and yield its deltas, but not the acceptance: a loss before the first delta is retried."""
        async with aclosing(ask(self.jobs, self.keys)) as items:
            async for item in items:
                if isinstance(item, EngineStopped):  # the replica's engine has ended; Ray will replace it
                    raise ReplicaLost(str(item))
                if isinstance(item, Exception):
                    raise item
                if item is not None:
                    yield item
                elif not self.accepted.done():
                    self.accepted.set_result(None)

    def refuse(self, error: Exception) -> None:
        """Tell the submitter that no replica has taken the jobs."""
        if not self.accepted.done():
            self.accepted.set_exception(error)

    def fail(self, error: str) -> None:
        """End all unfinished answers with this error."""
        for index in sorted(self.unfinished):
            self.put(index, TextDelta("", [], FinishReason.ERROR, error))
        wake_readers([self.mailbox], time.perf_counter())

    def put(self, index: int, delta: TextDelta) -> None:
        """Put a delta into the reader's mailbox."""
        if delta.finish_reason is not None:
            self.unfinished.discard(index)
        self.mailbox.put(index, delta)


class Cluster:
    """All replicas, with the part of EngineWorker that lesson 7's routes use.

    Args:
        limits: of one replica; all are alike.
        max_waiting: the most requests that may wait at one replica.
        ask: sends jobs to a replica of the router's choice and yields what its `Replica.answer` yields; raises
            ReplicaLost if it ends.
        close_session: forgets a session at every replica, and returns True if one of them had it.
    """

    is_alive, fault, stuck = True, "", ""  # Ray Serve replaces replicas that end

    def __init__(
        self, tokenizer: Tokenizer, limits: ModelLimits, max_waiting: int, ask: Ask, close_session: CloseSession
    ) -> None:
        self.tokenizer, self.limits, self.max_waiting, self.ask = tokenizer, limits, max_waiting, ask
        self._close_session = close_session
        self.open: set[OpenRequest] = set()
        self.numbers = itertools.count()

    async def submit(self, jobs: Sequence[Job]) -> Answers:
        """Send jobs to one replica, all or none, and wait until it has accepted them.

        Raises:
            UserError: one of them is invalid. QueueFull, ReplicaStopped, EngineStopped: not now.
        """
        keys = block_keys(jobs[0].prompt_ids, jobs[0].namespace, self.limits.block_size)
        request = OpenRequest(jobs, keys, next(self.numbers), self.tokenizer)
        request.reading = asyncio.create_task(request.read(self.ask))
        self.open.add(request)
        request.reading.add_done_callback(lambda _: self.open.discard(request))
        try:
            async with asyncio.timeout(ACCEPT_SECONDS):
                await request.accepted
        except TimeoutError:
            request.cancel()
            raise ReplicaStopped(f"no replica accepted the request within {ACCEPT_SECONDS:g} seconds") from None
        except BaseException:
            request.cancel()
            raise
        return request.answers

    async def close_session(self, session: Hashable, namespace: Hashable = None) -> bool:
        """Forget a session at every replica: its turns may have been at several. Return False if it is unknown."""
        return await self._close_session(session, namespace)

    def end_all(self, error: str) -> None:
        """End every open answer with this error."""
        for request in list(self.open):
            request.refuse(EngineStopped(error))
            request.fail(error)
            request.cancel()
