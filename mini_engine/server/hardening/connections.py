"""Lesson 7. uvicorn with guarded connections, fewer than the limit on file descriptors.

Every connection takes a file descriptor, of which a process has a limited number; once they run out, the server cannot
even answer /health. `guard` decides which connection to close when there are too many. uvicorn's `limit_concurrency`
answers 503 to /health, too, and leaves silent connections open.
"""

import asyncio
import logging
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from mini_engine.server.hardening.guard import Guard, GuardedProtocol
from mini_engine.server.hardening.traffic import LineASecond, Traffic
from mini_engine.server.listening import QUEUE
from mini_engine.server.server_config import ServerConfig

try:
    import resource
except ModuleNotFoundError:  # Windows has no such limit
    resource = None

BACKLOG = 16  # accepted in one turn of the event loop, so that a burst does not starve open connections
OWN_FILES = 64  # descriptors for everything except connections, beyond those open now
WANTED_FILES = 65536

log = logging.getLogger(__name__)


def room_for_connections(wanted: int) -> int:
    """Raise the limit on open files as far as needed and allowed. Return the number of connections that fit."""
    if resource is None:
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    own = files_open() + OWN_FILES
    needed = wanted + own + BACKLOG
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    most = max(soft, min(needed, WANTED_FILES if hard == resource.RLIM_INFINITY else hard))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    except (ValueError, OSError):  # macOS has another limit below the hard one
        log.warning("the limit on open files stays at %d", soft)
    return wanted if soft >= needed else max(1, min(wanted, (soft - own) * 2 // 3))  # a third for those to be refused


def files_open() -> int:
    """Return the number of descriptors in use, if the system reports it."""
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else OWN_FILES


class AcceptErrors(LineASecond):
    """An event loop's exception handler: logs failures to accept at most once a second, everything else as usual."""

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an exception of the event loop."""
        error = context.get("exception")
        if isinstance(error, OSError) and "accept" in context.get("message", ""):
            self.note("accept", str(error))
        else:
            loop.default_exception_handler(context)


class HardenedServer(uvicorn.Server):
    """uvicorn for one app, whose connections a Guard watches.

    Args:
        limits: of the connections.
        traffic: counts the responses to requests that do not reach the app.
        options: more for `uvicorn.Config`.
    """

    def __init__(self, app: Any, limits: ServerConfig, traffic: Traffic, **options: Any) -> None:
        limits = replace(limits, max_connections=room_for_connections(limits.max_connections))
        config = uvicorn.Config(
            app,
            loop="asyncio",  # uvloop ignores BufferedProtocol and reads without a bound
            http=partial(GuardedProtocol, guard=Guard(limits, traffic)),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            backlog=BACKLOG,
            log_config=None,
            log_level="error",  # it warns of each malformed request, and twice of each that asks to upgrade
            access_log=False,
            **options,
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening."""
        asyncio.get_running_loop().set_exception_handler(AcceptErrors("cannot accept connections"))
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(QUEUE)  # asyncio has set it to BACKLOG
