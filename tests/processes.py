"""Course machinery. Processes that tests start, stop and kill: whether they run, and waiting until something is so."""

import faulthandler
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

WAIT_SECONDS = 120
posix = pytest.mark.skipif(sys.platform == "win32", reason="sends signals, the POSIX way")


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """End the whole test run, with all threads' tracebacks, if the body hangs: no exception gets into a collective."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def wait_for(what: str, is_so: Callable[[], object], seconds: float = WAIT_SECONDS) -> None:
    """Wait until `is_so`."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"after {seconds:g} s still not: {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Return whether the process is there; one that has ended and was not waited for is."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def state_of(pid: int) -> str:
    """Return ps's letter for what a process does: T if it is stopped, Z or nothing if it has ended."""
    return _ps("-o", "state=", "-p", str(pid)).strip()[:1]


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, though the one that started it may not have asked."""
    return state_of(pid) in ("", "Z")


def wait_until_gone(pids: Sequence[int], seconds: float = WAIT_SECONDS) -> None:
    """Wait for the end of processes that are not our children."""
    wait_for(f"processes {pids} are gone", lambda: not any(map(is_alive, pids)), seconds)


def spawned_by(parent: int) -> list[int]:
    """Return the processes that Python has spawned for a process, and that run."""
    rows = [line.split(None, 3) for line in _ps("-eww", "-o", "pid=,ppid=,state=,args=").splitlines()]
    return [
        int(pid)
        for pid, above, state, args in rows
        if int(above) == parent and state[0] != "Z" and "spawn_main" in args
    ]


def _ps(*arguments: str) -> str:
    return subprocess.run(["ps", *arguments], capture_output=True, encoding="utf-8").stdout
