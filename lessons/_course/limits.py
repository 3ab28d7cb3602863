"""Course machinery. How long a check waits: a limit ends what would never end, and no right answer comes near one.

The limits were chosen on one machine. On a slower one they are longer, and the limit of a whole check, which is one of
real time, also while other processes keep the machine busy.
"""

import os
import time

TOTAL_SECONDS = 300.0
TEST_SECONDS = 20.0  # of processor time per test; the longest one of a right lesson takes 3.5
SMOKE_FACTOR = 6  # times what a test may take; the longest smoke script takes 12 s, or 27 on a crowded machine
MOST_TIMES = 8.0  # a whole check never takes longer than as many times its limit

ROUNDS = 300_000
USUAL_SECONDS = 0.013  # of processor time for these rounds, where the limits were chosen


def slowness() -> float:
    """Return how many times the usual processor time things take on this machine now; at least 1."""
    begun = time.process_time()
    sum(i * i for i in range(ROUNDS))
    return max(1.0, (time.process_time() - begun) / USUAL_SECONDS)


def busyness() -> float:
    """Return how many processes want each processor; at least 1, and 1 where the system does not tell."""
    try:
        return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    except (AttributeError, OSError):
        return 1.0


class TotalLimit:
    """The limit of a whole check: `seconds` of real time from now on, or more where the machine is slow or busy."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.started = time.monotonic()

    @property
    def waited(self) -> float:
        return time.monotonic() - self.started

    def is_over(self) -> bool:
        """Whether it has passed. The machine is asked how slow it is only then."""
        if self.waited <= self.seconds:
            return False
        return self.waited > self.seconds * min(MOST_TIMES, slowness() * busyness())
