"""Lesson 7. Traffic for operators: counts responses by status, and logs refusals and malformed requests.

A client can cause thousands of refusals a second. So each kind of event is logged as at most one line a second, with
the number of events.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client import Counter as Total
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mini_engine.base.values import shown

LOG_SECONDS = 1.0
CLIENT_CLOSED = 499  # nginx's status for a client that has gone

log = logging.getLogger(__name__)


def in_this_loop(seconds: float, work: Callable[[], None]) -> None:
    """Call `work` later, from the event loop that runs now."""
    asyncio.get_running_loop().call_later(seconds, work)


class LineASecond:
    """Logs the first event at once, and events within a second after a line as one line at the end of that second.

    Args:
        say: writes the line; `what` counts the events by kind, `latest` describes the newest.
        later: schedules a call after some seconds.
    """

    def __init__(
        self,
        say: Callable[[Counter[str], str], None],
        later: Callable[[float, Callable[[], None]], Any] = in_this_loop,
    ) -> None:
        self.say, self.later = say, later
        self.what: Counter[str] = Counter()
        self.latest = ""
        self.waits = False

    def note(self, kind: str, event: str) -> None:
        """Note an event."""
        self.what[kind] += 1
        self.latest = event
        if not self.waits:
            self.write()

    def write(self) -> None:
        """Write the events noted since the last line, if any."""
        self.waits = bool(self.what)
        if self.waits:
            self.say(self.what, self.latest)
            self.what = Counter()
            self.later(LOG_SECONDS, self.write)


class Traffic:
    """Counts a server's responses and logs its refusals. Also measures the process: memory and descriptors."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.responses = Total(
            "mini_engine_responses", "HTTP responses, by status.", ["status"], registry=self.registry
        )
        self.refusals = LineASecond(say_refused)
        self.nonsense = LineASecond(say_malformed)

    def answered(self, status: int, client: Any, asked: str = "") -> None:
        """Count a response. client: the address it goes to. asked: method and path; "" before a request is known."""
        self.responses.labels(status).inc()
        is_malformed = status == 400 and not asked  # `malformed` logs it
        if 400 <= status < 500 and status != CLIENT_CLOSED and not is_malformed:
            self.refusals.note(str(status), f"{asked or 'a connection'} from {address_of(client)}")

    def malformed(self, client: Any) -> None:
        """Note a request that is not HTTP."""
        self.nonsense.note("malformed", address_of(client))

    def text(self) -> bytes:
        """Return the exposition format, version 0.0.4."""
        return generate_latest(self.registry)


def say_refused(what: Counter[str], latest: str) -> None:
    """Write the line about refused requests."""
    counts = ", ".join(f"{status}: {count}" for status, count in sorted(what.items()))
    log.warning("refused requests: %d (%s), the latest %s", what.total(), counts, latest)


def say_malformed(what: Counter[str], latest: str) -> None:
    """Write the line about malformed requests."""
    log.warning("malformed requests: %d, the latest from %s", what.total(), latest)


def address_of(client: Any) -> str:
    """Return a client's address for the log. client: ASGI's pair of host and port, or None."""
    return "{}:{}".format(*client) if client else "an unknown address"


class Counted:
    """Tells `traffic` of each response of `app`."""

    def __init__(self, app: ASGIApp, traffic: Traffic) -> None:
        self.app, self.traffic = app, traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                asked = f"{scope['method']} {shown(scope['path'])}"
                self.traffic.answered(message["status"], scope.get("client"), asked)
            await send(message)

        await self.app(scope, receive, counted)
