"""Course machinery. An event loop for a page, which cannot wait for sockets or threads: it runs callbacks and sleeps.

A page's own loop belongs to the browser: it goes on only when Python has returned, so `asyncio.run` cannot use it.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock


class Clock:
    """A selector without files: waiting for events is waiting for the next timer."""

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("the event loop has nothing left to do: this would wait for ever")
        time.sleep(timeout)
        return []


class SmallLoop(asyncio.BaseEventLoop):
    """asyncio's own loop above a clock. Without threads, no call comes from another one, so nothing must wake it."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = Clock()

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


@contextlib.contextmanager
def small_loops() -> Iterator[None]:
    """In a page, let asyncio make small loops; elsewhere change nothing."""
    if sys.platform != "emscripten":
        yield
        return
    running = asyncio._get_running_loop()  # Pyodide's, always: asyncio allows no other beside it
    asyncio._set_running_loop(None)
    try:
        with mock.patch("asyncio.events.new_event_loop", SmallLoop), mock.patch("asyncio.new_event_loop", SmallLoop):
            yield
    finally:
        asyncio._set_running_loop(running)
