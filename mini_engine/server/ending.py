"""Lesson 7. Ends the process when the grace is over, also if a thread never returns from what it is doing.

A thread cannot be ended from outside. What can be ended is the process.
"""

import logging
import os
import sys
import threading
import time
from contextlib import suppress

from mini_engine.engine.worker import EngineWorker

RELEASE_SECONDS = 2.0  # for the processes of other ranks to be killed
LEAST_SECONDS = 5.0  # for Python itself to end, however little is left of the grace

log = logging.getLogger(__name__)


def end_in_time(worker: EngineWorker, seconds: float) -> None:
    """End the engine's thread, and make sure that the process ends.

    If the thread does not return from its step, the process ends here, with exit code 1. Otherwise it ends as usual,
    but not later than the grace or LEAST_SECONDS: records that wait for a disk that hangs are lost then.

    Args:
        seconds: what is left of the grace.
    """
    seconds = min(seconds, threading.TIMEOUT_MAX)
    deadline = time.monotonic() + seconds
    if not worker.close(seconds):
        log.error("the engine's step did not return within the grace; the process ends without it")
        release(worker)
        leave(1)
    left = max(LEAST_SECONDS, deadline - time.monotonic())
    ending = threading.Timer(left, leave, [2 if worker.fault else 0])
    ending.daemon = True  # it ends with the process, if that is sooner
    ending.start()


def release(worker: EngineWorker) -> None:
    """End what the engine holds outside this process, as far as that goes in a short time."""
    closing = threading.Thread(target=worker.engine.runner.close, daemon=True)
    closing.start()
    closing.join(RELEASE_SECONDS)


def leave(code: int) -> None:
    """End the process at once."""
    with suppress(OSError):  # the disk may be full
        sys.stdout.flush()
    os._exit(code)
