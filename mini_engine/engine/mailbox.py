"""Lesson 6. Passes deltas from the engine thread to one reader, so that a slow reader never blocks the engine."""

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import Iterable
from contextlib import suppress

from mini_engine.engine.answer import TextDelta


def merge(first: TextDelta, second: TextDelta) -> TextDelta:
    """Join two consecutive deltas of one answer."""
    return TextDelta(
        first.text + second.text,
        first.token_ids + second.token_ids,
        second.finish_reason,
        second.error,
        first.logprobs + second.logprobs,
        first.prompt_logprobs + second.prompt_logprobs,
        first.num_cached_tokens + second.num_cached_tokens,
    )


class Mailbox:
    """One reader's queue. It needs no bound: it never holds more than the reader's own answers.

    Args:
        loop: the reader's event loop; None for a reader in its own thread.

    Attributes:
        ready: set when something has arrived; wait for it, then `take`.
        woken: when the reader was last woken.
        urgent: an answer has ended, so its reader is woken at once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop
        self.ready: threading.Event | asyncio.Event = threading.Event() if loop is None else asyncio.Event()
        self.waiting: deque[tuple[int, TextDelta]] = deque()
        self.woken = float("-inf")
        self.urgent = False

    def wait(self) -> None:
        """Block the reader's thread until something has arrived."""
        if isinstance(self.ready, asyncio.Event):
            raise RuntimeError("this mailbox belongs to an event loop; use `async for`")
        self.ready.wait()

    async def wait_async(self) -> None:
        """Wait in the reader's event loop until something has arrived."""
        if isinstance(self.ready, threading.Event):
            raise RuntimeError("this mailbox belongs to a thread; use `for`")
        await self.ready.wait()

    def put(self, index: int, delta: TextDelta) -> None:
        """Add a delta of answer `index`. `wake_readers` wakes the reader."""
        self.waiting.append((index, delta))
        self.urgent |= delta.finish_reason is not None

    def is_due(self, now: float, pace: float) -> bool:
        """Return True if deltas wait and `urgent` is set or the last wake-up was at least `pace` seconds ago."""
        return bool(self.waiting) and (self.urgent or now - self.woken >= pace)

    def take(self) -> list[tuple[int, TextDelta]]:
        """Remove and return all waiting deltas, merged to one per answer: a slow reader gets few, large deltas."""
        self.ready.clear()  # before reading, so that a delta arriving meanwhile sets it again
        merged: dict[int, TextDelta] = {}
        while self.waiting:
            index, delta = self.waiting.popleft()
            merged[index] = merge(merged[index], delta) if index in merged else delta
        return list(merged.items())


def wake_readers(mailboxes: Iterable[Mailbox], now: float) -> None:
    """Wake the readers of these mailboxes, with one call per event loop however many readers it has."""
    loops = defaultdict(list)
    for mailbox in mailboxes:
        mailbox.woken, mailbox.urgent = now, False
        loops[mailbox.loop].append(mailbox.ready)
    for loop, events in loops.items():
        if loop is None:
            set_all(events)
        else:
            with suppress(RuntimeError):  # the loop is closed and its readers are gone
                loop.call_soon_threadsafe(set_all, events)


def set_all(events: Iterable[threading.Event | asyncio.Event]) -> None:
    """Set every event. asyncio events must be set in their own loop."""
    for event in events:
        event.set()
