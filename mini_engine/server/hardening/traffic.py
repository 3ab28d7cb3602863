"""Lesson 7. Traffic for operators: counts responses by status, and logs refusals and malformed requests.

A client can cause thousands of refusals a second. So each kind of event is logged as at most one line a second, with
the number of events.
"""

import asyncio
import logging
from collections import Counter
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client import Counter as Total

from mini_engine.server.disconnect import CLIENT_CLOSED

LOG_SECONDS = 1.0

log = logging.getLogger(__name__)


class LineASecond:
    """Logs the first event at once, and events within a second after a line as one line at the end of that second.

    Args:
        subject: begins each line; the number of events by kind, and the latest one, follow.
    """

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.counts: Counter[str] = Counter()
        self.latest = ""
        self.waits = False

    def note(self, kind: str, event: str) -> None:
        """Note an event."""
        self.counts[kind] += 1
        self.latest = event
        if not self.waits:
            self.write()

    def write(self) -> None:
        """Write the events noted since the last line, if any."""
        self.waits = bool(self.counts)
        if self.waits:
            counts = ", ".join(f"{kind}: {count}" for kind, count in sorted(self.counts.items()))
            log.warning("%s: %d (%s), the latest %s", self.subject, self.counts.total(), counts, self.latest)
            self.counts.clear()
            asyncio.get_running_loop().call_later(LOG_SECONDS, self.write)


class Traffic:
    """Counts a server's responses and logs its refusals. Also measures the process: memory and descriptors."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.responses = Total(
            "mini_engine_responses", "HTTP responses, by status.", ["status"], registry=self.registry
        )
        self.refusals = LineASecond("refused requests")

    def answered(self, status: int, client: Any, asked: str) -> None:
        """Count a response, and log a refusal."""
        self.responses.labels(status).inc()
        if status != CLIENT_CLOSED:
            self.refused(status, client, asked)

    def refused(self, status: int, client: Any, asked: str) -> None:
        """Log a refusal, if `status` says that the client is at fault.

        Args:
            client: its address, as ASGI's pair of host and port, or None. asked: method and path, or what came instead.
        """
        if 400 <= status < 500:
            address = "{}:{}".format(*client) if client else "an unknown address"
            self.refusals.note(str(status), f"{asked} from {address}")

    def text(self) -> bytes:
        """Return the exposition format, version 0.0.4."""
        return generate_latest(self.registry)
