"""Lesson 12. A background thread that drains a bounded queue. A full queue refuses: the caller never waits."""

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")
POLL_SECONDS = 0.01
NICENESS = 10

log = logging.getLogger(__name__)


class Background(Generic[ItemT]):
    """Calls `work(item)` for each offered item, in order, in a thread of its own.

    Args:
        name: the thread's name.
        work: what to do with an item. An exception is logged and ends only that item.
        max_items: items that may wait at the same time.

    Attributes:
        num_dropped: items refused because the queue was full.
    """

    def __init__(self, name: str, work: Callable[[ItemT], object], max_items: int) -> None:
        self.work = work
        self.items: queue.Queue[ItemT | None] = queue.Queue(max(1, max_items))
        self.num_dropped, self.counting = 0, threading.Lock()
        self.closed = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    @property
    def has_room(self) -> bool:
        """True if the queue would take an item now. Only `offer` can fill it."""
        return not (self.closed or self.items.full())

    def offer(self, item: ItemT) -> bool:
        """Put an item in the queue. Return False, and drop it, if the queue is full or closed."""
        try:
            if self.closed:
                return False
            self.items.put_nowait(item)
        except queue.Full:
            with self.counting:  # several threads may offer
                self.num_dropped += 1
            return False
        return True

    def flush(self, seconds: float) -> bool:
        """Wait until everything offered so far is done, at most `seconds`. Return whether it is."""
        deadline = time.monotonic() + seconds
        while self.items.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return not self.items.unfinished_tasks

    def close(self, seconds: float) -> None:
        """Refuse new items, finish those in the queue, and end the thread, all within `seconds`. Idempotent."""
        if self.closed:
            return
        self.closed = True
        deadline = time.monotonic() + seconds
        self.flush(seconds)
        while True:  # what is left after that time is dropped
            try:
                self.items.get_nowait()
                self.items.task_done()
            except queue.Empty:
                break
        self.items.put(None)
        self.thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        yield_to_others()
        while (item := self.items.get()) is not None:
            try:
                self.work(item)
            except Exception:
                log.exception("%s failed on one item", self.thread.name)
            finally:
                item = None  # it may hold memory, and the next one may not come for long
                self.items.task_done()


def yield_to_others() -> None:
    """Lower this thread's priority, where threads have one of their own: steps come first when cores are short."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
