"""Lesson 13. Shared by the tests of ends: a watchdog, and the end of processes."""

import faulthandler
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

WAIT_SECONDS = 120


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """End the whole test run, with all threads' tracebacks, if the body hangs: no exception gets into a collective."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def is_alive(pid: int) -> bool:
    """Return whether the process runs; one that has ended and was not waited for does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(pids: list[int]) -> None:
    """Wait for the end of processes that are not our children."""
    end = time.monotonic() + WAIT_SECONDS
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < end, f"processes {left} are left behind"
        time.sleep(0.1)
