"""Lesson 6. A burst: clients that were answered in one step ask together again, and can begin in one step.

If the first of them were computed alone, it would then stand still while the others' prompts are computed.
"""

import threading
import time
from collections.abc import Callable, Hashable

PAUSE, LONGEST = 0.003, 0.03  # seconds: between two jobs of a burst, and in all


def wait_for_burst(
    changed: threading.Condition, state: Callable[[], Hashable], now: Callable[[], float] = time.monotonic
) -> None:
    """Wait until nothing has changed for PAUSE seconds, but not beyond LONGEST.

    Args:
        changed: held by the caller, and notified of each change. state: differs after each change.
    """
    until = now() + LONGEST
    while now() < until:
        seen = state()
        if not changed.wait_for(lambda seen=seen: state() != seen, PAUSE):
            return
