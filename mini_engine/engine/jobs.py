"""Lesson 6. The reader's side of the engine thread: submits jobs and reads their answers as they arrive."""

from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from mini_engine.engine.answer import TextDelta
from mini_engine.engine.mailbox import Mailbox
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.text.tokenizer import Tokenizer


class Job(NamedTuple):
    """One prompt to answer.

    namespace: prefixes are shared only within it (lesson 8).
    priority: with the scheduler's policy "priority", smaller numbers go first.
    session: the conversation that it is a turn of, if the client says so (lesson 20).
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    namespace: Hashable = None
    priority: int = 0
    session: Hashable = None


class Answers:
    """The answers to jobs submitted together, as an iterator of (index of the job, delta).

    Use `for` in a thread, or `async for` in the event loop that submitted them. To leave early, call `close`, which
    aborts unfinished requests.

    Args:
        ids: the requests' ids, one for each job.
        abort: aborts the requests with the given ids.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        ids: Sequence[str],
        mailbox: Mailbox,
        tokenizer: Tokenizer,
        abort: Callable[[Iterable[str]], None],
    ) -> None:
        self.jobs, self.ids = jobs, ids
        self.mailbox, self.tokenizer, self.abort = mailbox, tokenizer, abort
        self.left = len(jobs)

    def _take(self) -> Iterator[tuple[int, TextDelta]]:
        for index, delta in self.mailbox.take():
            self.left -= delta.finish_reason is not None
            yield index, delta

    def __iter__(self) -> Iterator[tuple[int, TextDelta]]:
        while self.left > 0:
            self.mailbox.wait()
            yield from self._take()

    async def __aiter__(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        while self.left > 0:
            await self.mailbox.wait_async()
            for item in self._take():
                yield item

    def close(self) -> None:
        """Stop reading and abort unfinished requests. Idempotent."""
        if self.left > 0:
            self.left = 0
            self.abort(self.ids)
