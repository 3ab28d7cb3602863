"""Lesson 12. Decides whether writing is worth trying: a disk that refuses is left alone, and tried again later."""

import logging
from collections.abc import Callable
from pathlib import Path

MOST_FAILURES = 3
RETRY_SECONDS = 60.0

log = logging.getLogger(__name__)


class Outage:
    """Counts writes that failed in a row. After MOST_FAILURES of them there is one try every RETRY_SECONDS.

    An outage is logged once when it begins and once when it ends, however long it lasts.

    Args:
        directory: what the log names. clock: returns seconds.
    """

    def __init__(self, directory: Path, clock: Callable[[], float]) -> None:
        self.directory, self.clock = directory, clock
        self.num_failed, self.retry_at = 0, 0.0

    @property
    def should_try(self) -> bool:
        """True if it is time to try a write."""
        return self.num_failed < MOST_FAILURES or self.clock() >= self.retry_at

    def failed(self, error: OSError) -> None:
        """Note a write that failed."""
        self.num_failed += 1
        self.retry_at = self.clock() + RETRY_SECONDS
        if self.num_failed == MOST_FAILURES:
            log.warning(
                "cannot write to the cache directory %s (%s): records are dropped, with a new try every %d seconds",
                self.directory,
                error.strerror or error,
                RETRY_SECONDS,
            )

    def succeeded(self) -> None:
        """Note a write that did not."""
        if self.num_failed >= MOST_FAILURES:
            log.warning("the cache directory %s can be written again", self.directory)
        self.num_failed = 0
