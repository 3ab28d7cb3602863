"""Course machinery. Follows the events that a test run writes, one JSON object per line."""

import json
import time
from collections.abc import Callable
from typing import Any, TextIO

from lessons._course.smoke import LEAVE_SECONDS

Watcher = Callable[[dict[str, Any]], None]


class Tail:
    """Follows a growing file of JSON lines; takes complete lines only."""

    def __init__(self, file: TextIO, take: Watcher) -> None:
        self.file = file
        self.take = take
        self.rest = ""
        self.last: dict[str, Any] = {}
        self.ended = 0.0

    def read(self) -> None:
        *lines, self.rest = (self.rest + self.file.read()).split("\n")
        for line in lines:
            self.last = json.loads(line)
            self.take(self.last)
        if self.last.get("event") == "end" and not self.ended:
            self.ended = time.monotonic()

    def has_ended(self) -> bool:
        """Whether the last event came a while ago: a thread that never ends must not keep the process."""
        return bool(self.ended) and time.monotonic() > self.ended + LEAVE_SECONDS
