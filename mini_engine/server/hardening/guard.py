"""Lesson 7. Guards one client's connection: bounds everything that a client could make large or slow.

| a client … | bound |
| --- | --- |
| sends headers slowly | `header_seconds`, from the connection's beginning or the last response |
| sends a body in tiny chunks | `max_body_bytes` over the wire, framing included |
| sends a body that has been refused | LINGER_BYTES of it are read and dropped, within LINGER_SECONDS |
| does not read its answer | LEAST_BYTES of it in each `write_seconds` |
| opens connections and sends nothing | at `max_connections`, the one that has been silent longest is closed |
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mini_engine.server.errors import RETRY, ApiError
from mini_engine.server.hardening.traffic import Traffic
from mini_engine.server.server_config import ServerConfig

PIECE = 2**13  # bytes read at a time: as one-byte chunks they take h11 5 ms, then other connections get their turn
MAX_HEAD = 2**14  # h11's limit for headers, which count as bytes over the wire
LEAST_BYTES = 2**14
LINGER_SECONDS = 1.0
LINGER_BYTES = 2**16


@dataclass
class Guard:
    """The state that all connections of one server share.

    limits: the server's; `max_connections` as limited by `room_for_connections`.
    traffic: counts the responses that a connection sends before the app has a request.
    silent: the connections whose client has to send something next, the longest silent first.
    buffer: the bytes just read; each connection takes them out before the next one reads.
    """

    limits: ServerConfig
    traffic: Traffic
    silent: dict["GuardedProtocol", None] = field(default_factory=dict)
    buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(PIECE)))


class Lingering:
    """A transport that closes in two steps if part of a request is unread, as nginx's `lingering_close` does.

    Closing a socket with unread bytes resets the connection, and the reset may overtake the answer. So only the
    server's half is closed at first, and incoming bytes are dropped. The other half follows when the client closes, or
    after LINGER_SECONDS.

    Args:
        is_unread: returns True if part of a request is unread.
    """

    def __init__(self, transport: asyncio.Transport, is_unread: Callable[[], bool]) -> None:
        self.transport, self.is_unread = transport, is_unread
        self.lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def is_closing(self) -> bool:
        """Return True if `close` was called."""
        return self.lingers or self.transport.is_closing()

    def close(self) -> None:
        """Close, at once or in two steps."""
        if self.is_closing():
            return
        if not self.is_unread():
            self.transport.close()
            return
        self.lingers = True
        self.transport.write_eof()
        self.transport.resume_reading()
        asyncio.get_running_loop().call_later(LINGER_SECONDS, self.transport.abort)


class GuardedProtocol(H11Protocol, asyncio.BufferedProtocol):
    """uvicorn's connection within this module's bounds. As a BufferedProtocol, it reads at most PIECE at a time."""

    def __init__(self, *args: Any, guard: Guard, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.guard, self.limits = guard, guard.limits
        self.header_timer: asyncio.TimerHandle | None = None
        self.write_timer: asyncio.TimerHandle | None = None
        self.num_received = 0  # bytes since the last response

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection. If there are too many, close the one silent for longest, or else this one."""
        transport.set_write_buffer_limits(high=0)  # time everything that waits for the client, even the last few bytes
        self.lingering = Lingering(transport, self.is_unread)
        super().connection_made(self.lingering)  # type: ignore[arg-type]
        most = self.limits.max_connections
        if len(self.connections) > most:
            silent = next(iter(self.guard.silent), self)
            silent.refuse(503, f"this server serves {most} connections at a time; try again soon")
        self.watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self.guard.silent.pop(self, None)
        stop(self.header_timer, self.write_timer)
        super().connection_lost(exc)

    def is_unread(self) -> bool:
        """Return True if part of a request is unread, or the client has sent something other than HTTP."""
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    # Reading from the client

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer that asyncio reads into."""
        return self.guard.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Process the bytes just read."""
        self.data_received(bytes(self.guard.buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Parse incoming bytes, unless the connection is closing or there are too many."""
        self.num_received += len(data)
        if self.transport.is_closing():
            if self.num_received > LINGER_BYTES:
                self.transport.pause_reading()
            return
        if self.num_received > self.limits.max_body_bytes + MAX_HEAD:
            most = self.limits.max_body_bytes
            self.refuse(413, f"the body is larger than {most} bytes, chunk framing included", "body_too_large")
            return
        super().data_received(data)
        self.watch()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self.num_received = 0
        super().on_response_complete()
        self.watch()

    def watch(self) -> None:
        """Track whether the client has to send something next, and time its headers."""
        their_state = self.conn.their_state
        lingers, is_closing = self.lingering.lingers, self.lingering.transport.is_closing()
        is_silent = not is_closing and (lingers or their_state in (h11.IDLE, h11.SEND_BODY))
        if not is_silent or their_state is h11.SEND_BODY:  # a body in transit, which `body_seconds` bounds
            self.guard.silent.pop(self, None)
        if is_silent:
            self.guard.silent.setdefault(self)
        if their_state is not h11.IDLE or self.transport.is_closing():
            stop(self.header_timer)
            self.header_timer = None
        elif self.header_timer is None:
            self.header_timer = self.loop.call_later(self.limits.header_seconds, self.too_late)

    def too_late(self) -> None:
        """Close a connection whose request did not arrive in time."""
        self.header_timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.refuse(408, f"the request's headers did not arrive within {self.limits.header_seconds:g} seconds")

    def refuse(self, status: int, message: str, code: str | None = None) -> None:
        """Answer with an error, unless an answer has begun, and close."""
        self.guard.silent.pop(self, None)
        self.guard.traffic.refused(status, self.client, "a connection")
        if self.transport.is_closing():
            self.transport.abort()
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.send_error(ApiError(status, message, code=code, headers=RETRY if status == 503 else None))
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # for the app, the client has gone
            self.cycle.message_event.set()
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP, even in the middle of an answer."""
        self.refuse(400, "this is not a valid HTTP request")

    def send_error(self, error: ApiError) -> None:
        """Write a whole response."""
        response = error.response()
        headers = [*response.raw_headers, (b"connection", b"close")]
        self.guard.traffic.responses.labels(error.status_code).inc()
        head = h11.Response(status_code=error.status_code, headers=headers)
        for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")

    # Writing to the client

    def pause_writing(self) -> None:
        """Start timing the client: part of its answer waits in the write buffer."""
        super().pause_writing()
        self.time_reading()

    def resume_writing(self) -> None:
        """Stop timing the client: it has read enough."""
        super().resume_writing()
        stop(self.write_timer)

    def time_reading(self) -> None:
        """Check after `write_seconds` how much the client has read."""
        unread = self.transport.get_write_buffer_size()
        self.write_timer = self.loop.call_later(self.limits.write_seconds, self.check_reading, unread)

    def check_reading(self, unread: int) -> None:
        """Abort the connection if the client has read too little."""
        if unread - self.transport.get_write_buffer_size() < LEAST_BYTES:
            self.transport.abort()
        else:
            self.time_reading()


def stop(*timers: asyncio.TimerHandle | None) -> None:
    """Cancel the timers that are running."""
    for timer in timers:
        if timer is not None:
            timer.cancel()
