"""Lesson 7. uvicorn with guarded connections. What uvicorn's own options do is left to them."""

import asyncio
import socket
from dataclasses import replace
from functools import partial
from typing import Any

import uvicorn

from mini_engine.server.hardening.connections import BACKLOG, AcceptErrors, room_for_connections
from mini_engine.server.hardening.guard import Guard, GuardedProtocol
from mini_engine.server.hardening.traffic import Traffic
from mini_engine.server.listening import QUEUE
from mini_engine.server.server_config import ServerConfig


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
