"""Lesson 7. Bounds what clients can hold open: connections, and the time that a request's headers may take.

Every connection costs a file descriptor, of which a process has a limited number; without any left, the server cannot
even answer /health. So there are fewer connections than descriptors, and one too many gets a 503 and is closed.
"""

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mini_engine.server.config import ServerConfig
from mini_engine.server.errors import RETRY, ApiError

try:
    import resource
except ModuleNotFoundError:  # Windows has no such limit
    resource = None

BACKLOG = 128  # connections that the system holds until they are accepted, and that one turn of the loop accepts
OWN_FILES = 64  # descriptors for everything but connections, beyond those open now
WANTED_FILES = 65536
LOG_SECONDS = 1.0

log = logging.getLogger(__name__)


def room_for_connections(wanted: int) -> int:
    """Raise the limit on open files as far as needed and allowed. Return how many connections fit under it."""
    if resource is None:
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + files_open() + OWN_FILES + BACKLOG
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = min(needed, WANTED_FILES) if hard == resource.RLIM_INFINITY else min(needed, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
            soft = max(soft, most)
        except (ValueError, OSError):  # macOS has a limit of its own below the hard one
            log.warning("the limit on open files stays at %d", soft)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    return max(1, min(wanted, (soft - files_open() - OWN_FILES) * 2 // 3))  # a third for those still to be refused


def files_open() -> int:
    """The number of descriptors in use, where the system tells."""
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else OWN_FILES


class GuardedProtocol(H11Protocol):
    """One connection. Closed if it is one too many, or if a request's headers take too long.

    Args:
        limits: the server's; `max_connections` as `room_for_connections` has allowed it.
    """

    def __init__(self, *args: Any, limits: ServerConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limits = limits
        self.timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, or refuse it."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self.refuse(503, f"this server serves {self.limits.max_connections} connections at a time; try again soon")
        self.watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        self.stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came, unless the connection has been refused."""
        if not self.transport.is_closing():
            super().data_received(data)
            self.watch()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self.watch()

    def watch(self) -> None:
        """Time the headers: from the connection's beginning, or the last response, until they have arrived."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self.stop_watching()
        elif self.timer is None:
            self.timer = self.loop.call_later(self.limits.header_seconds, self.too_late)

    def stop_watching(self) -> None:
        """Cancel the timer."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def too_late(self) -> None:
        """Close a connection whose request did not come."""
        self.timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.refuse(408, f"the request's headers did not arrive within {self.limits.header_seconds:g} seconds")

    def refuse(self, status: int, message: str) -> None:
        """Answer with an error, if no answer has begun, and close."""
        if self.conn.our_state is h11.IDLE:
            body = json.dumps(ApiError(status, message).body).encode()
            headers = [
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
                *(RETRY.items() if status == 503 else ()),
            ]
            for event in (
                h11.Response(status_code=status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class AcceptErrors:
    """An event loop's exception handler: failing to accept is one line a second at most, everything else as usual."""

    def __init__(self) -> None:
        self.latest, self.missed = float("-inf"), 0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What asyncio calls."""
        if not isinstance(context.get("exception"), OSError) or "accept" not in context.get("message", ""):
            loop.default_exception_handler(context)
            return
        self.missed += 1
        now = time.monotonic()
        if now - self.latest >= LOG_SECONDS:
            log.error("cannot accept connections: %s (%d times)", context["exception"], self.missed)
            self.latest, self.missed = now, 0
