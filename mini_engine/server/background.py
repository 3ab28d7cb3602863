"""Lesson 7. uvicorn that drains before it ends and can run in a thread."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from mini_engine.base.signals import handling
from mini_engine.server.app import ServerApp
from mini_engine.server.hardening.connections import HardenedServer
from mini_engine.server.listening import listen, url_of

CUT_SECONDS = 1  # for requests still in flight when the grace period is over
FAREWELL_SECONDS = 1  # from the engine's end to the server's, so that /health can report it
ENDING_SECONDS = 5  # of the grace period: to cut off requests and end Python itself


class DrainingServer(HardenedServer):
    """The first SIGTERM or Ctrl-C starts the drain; the server ends when nothing is in flight or time is up.

    When the grace period is over, requests in flight end with an error, so that a stream's client can tell this from a
    complete answer. If the engine fails, the drain starts on its own.
    """

    def __init__(self, app: ServerApp, grace_seconds: float) -> None:
        super().__init__(app, app.config, app.traffic, timeout_graceful_shutdown=CUT_SECONDS)
        self.app, self.drain, self.grace_seconds = app, app.drain, grace_seconds
        self.ending_seconds = min(ENDING_SECONDS, grace_seconds / 2)
        self.deadline = float("inf")  # for requests in flight
        self.stays_until = 0.0
        self.cut = False

    @property
    def seconds_left(self) -> float:
        """Seconds until the grace period is over; the whole period before the drain."""
        return min(self.grace_seconds, max(0.0, self.deadline + self.ending_seconds - time.monotonic()))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal, for uvicorn. A second one ends the grace period."""
        if self.drain.draining:
            self.deadline = min(self.deadline, time.monotonic())
        self.begin_drain()

    def begin_drain(self) -> None:
        """Refuse new requests, and stop once those in flight have finished."""
        self.drain.begin()
        self.deadline = min(self.deadline, time.monotonic() + self.grace_seconds - self.ending_seconds)

    async def on_tick(self, counter: int) -> bool:
        """Return True to stop; uvicorn calls this ten times a second."""
        if self.app.worker.fault and not self.drain.draining:
            self.begin_drain()
            self.stays_until = time.monotonic() + FAREWELL_SECONDS
        if self.drain.draining:
            late = time.monotonic() - self.deadline
            if late > 0 and not self.cut:
                self.cut = True
                self.app.worker.end_all("the server is shutting down")
            idle = self.drain.num_in_flight == 0 and time.monotonic() > self.stays_until
            if idle or late > CUT_SECONDS:
                self.should_exit = True
        return await super().on_tick(counter)


@contextmanager
def draining_on_hangup(server: DrainingServer) -> Iterator[None]:
    """Let SIGHUP, sent when the terminal is closed, drain the server, unless it is ignored, as under nohup."""
    if not hasattr(signal, "SIGHUP") or signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        yield
        return
    with handling(signal.SIGHUP, server.handle_exit):
        yield


@contextmanager
def in_background(app: ServerApp, grace_seconds: float = 5.0) -> Iterator[str]:
    """Serve from a thread on a free local port and yield the address. Drains at the end."""
    with listen("127.0.0.1", 0) as listener:
        server = DrainingServer(app, grace_seconds)
        thread = threading.Thread(target=server.run, args=([listener],), name="server", daemon=True)
        thread.start()
        try:
            yield url_of(listener)
        finally:
            server.begin_drain()
            thread.join()
