"""Lesson 7. Ends the process when the grace period is over, even if a thread never returns from a call.

A thread cannot be killed from outside; only the process can.
"""

import logging
import os
import sys
import threading
import time
from contextlib import suppress

from mini_engine.engine.worker import EngineWorker

RELEASE_SECONDS = 2.0  # to kill the processes of other ranks
LEAST_SECONDS = 5.0  # for Python itself to end, however little of the grace period is left

log = logging.getLogger(__name__)


def end_in_time(worker: EngineWorker, seconds: float) -> None:
    """End the engine thread, and make sure that the process ends.

    If the thread does not return from its step, the process ends here, with exit code 1. Otherwise it ends as usual,
    but no later than the grace period or LEAST_SECONDS: records that wait for a hung disk are then lost.

    Args:
        seconds: the rest of the grace period.
    """
    seconds = min(seconds, threading.TIMEOUT_MAX)
    deadline = time.monotonic() + seconds
    if not worker.close(seconds):
        log.error("the engine's step did not return within the grace period; ending the process")
        closing = threading.Thread(target=worker.engine.runner.close, daemon=True)  # resources outside this process
        closing.start()
        closing.join(RELEASE_SECONDS)
        leave(1)
    left = max(LEAST_SECONDS, deadline - time.monotonic())
    ending = threading.Timer(left, leave, [2 if worker.fault else 0])
    ending.daemon = True  # it does not keep the process alive
    ending.start()


def leave(code: int) -> None:
    """End the process at once."""
    with suppress(OSError):  # the disk may be full
        sys.stdout.flush()
    os._exit(code)
