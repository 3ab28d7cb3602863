"""Lesson 7. What an operator sees of the requests: responses counted by status, refusals and nonsense in the log.

A client can cause thousands of refusals a second. Each kind of event is therefore one line a second at most, which says
how many there were.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client import Counter as Total
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mini_engine.values import shown

LOG_SECONDS = 1.0
CLIENT_CLOSED = 499  # nginx's status for it; no client is left to see it

log = logging.getLogger(__name__)


def in_this_loop(seconds: float, work: Callable[[], None]) -> None:
    """Call `work` later, from the event loop that runs now."""
    asyncio.get_running_loop().call_later(seconds, work)


class LineASecond:
    """Logs the first event at once, and what comes within a second of a line as one line at the end of that second.

    Args:
        say: writes a line about so many events; `what` counts them by kind, `latest` describes the newest.
        later: calls something after so many seconds.
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
        """Write what has been noted since the last line, if anything has."""
        self.waits = bool(self.what)
        if self.waits:
            self.say(self.what, self.latest)
            self.what = Counter()
            self.later(LOG_SECONDS, self.write)


class Traffic:
    """Counts a server's responses, and logs what it refuses. It also measures the process: memory and descriptors."""

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
        """Note what is not HTTP."""
        self.nonsense.note("malformed", address_of(client))

    def text(self) -> bytes:
        """The exposition format, version 0.0.4."""
        return generate_latest(self.registry)


def say_refused(what: Counter[str], latest: str) -> None:
    """Write the line about refused requests."""
    counts = ", ".join(f"{status}: {count}" for status, count in sorted(what.items()))
    log.warning("refused requests: %d (%s), the latest %s", what.total(), counts, latest)


def say_malformed(what: Counter[str], latest: str) -> None:
    """Write the line about what is not HTTP."""
    log.warning("malformed requests: %d, the latest from %s", what.total(), latest)


def address_of(client: Any) -> str:
    """A client's address for the log: ASGI's pair of host and port, or None."""
    return "{}:{}".format(*client) if client else "an unknown address"


class Counted:
    """Tells `traffic` of each response of `app`."""

    def __init__(self, app: ASGIApp, traffic: Traffic) -> None:
        self.app, self.traffic = app, traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What ASGI calls."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                asked = f"{scope['method']} {shown(scope['path'])}"
                self.traffic.answered(message["status"], scope.get("client"), asked)
            await send(message)

        await self.app(scope, receive, counted)
