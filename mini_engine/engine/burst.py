"""Lesson 6. A burst: clients that were answered in one step ask together again, and can begin in one step.

If the first of them were computed alone, it would then stand still while the others' prompts are computed.
"""

import threading
import time
from collections.abc import Callable, Hashable

PAUSE = 0.003  # seconds, at most
PART_OF_A_STEP = 0.1  # a pause costs little beside the step that follows it
MOST_PAUSES = 10


def wait_for_burst(
    changed: threading.Condition,
    state: Callable[[], Hashable],
    step_seconds: float,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Wait until nothing has changed for a pause, but not for more than MOST_PAUSES of them.

    Args:
        changed: held by the caller, and notified of each change. state: differs after each change.
        step_seconds: what a step takes, which decides how long a pause is.
    """
    pause = min(PAUSE, PART_OF_A_STEP * step_seconds)
    until = now() + MOST_PAUSES * pause
    while now() < until:
        seen = state()
        if not changed.wait_for(lambda seen=seen: state() != seen, pause):
            return
