"""Lesson 6. The reader's side of the engine thread: jobs to submit, and their answers, read as they arrive."""

from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from mini_engine.engine.answer import TextDelta
from mini_engine.engine.mailbox import Mailbox
from mini_engine.engine.request import Request
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.tokenizer import Tokenizer


class Job(NamedTuple):
    """One prompt to be answered. namespace: prefixes are shared only within it (lesson 8)."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    namespace: Hashable = None


class Answers:
    """The answers to jobs submitted together, as an iterator of (index of the job, delta).

    Use `for` in a thread, or `async for` in the event loop that submitted them. To leave early, call `close`, which
    aborts unfinished requests. `requests` belong to the engine and are read-only.

    Args:
        abort: aborts the requests with the given ids.
    """

    def __init__(
        self, ids: Sequence[str], mailbox: Mailbox, tokenizer: Tokenizer, abort: Callable[[Iterable[str]], None]
    ) -> None:
        self.ids, self.mailbox, self.tokenizer, self.abort = ids, mailbox, tokenizer, abort
        self.requests: list[Request] = []
        self.left = len(ids)

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
