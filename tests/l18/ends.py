"""Lesson 18. Shared by the tests of ends: a watchdog, the end of processes, and what ranks do when a fault comes."""

import faulthandler
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from mini_engine.families.qwen3 import DENSE

WAIT_SECONDS = 120
FOREVER = 600.0


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


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, though the one that started it may not have asked."""
    state = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, encoding="utf-8").stdout
    return not state.strip() or state.startswith("Z")


def wait_until_gone(pids: list[int], seconds: float = WAIT_SECONDS) -> None:
    """Wait for the end of processes that are not our children."""
    end = time.monotonic() + seconds
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < end, f"processes {left} are left behind"
        time.sleep(0.02)


def wait_for(what: str, is_so: Callable[[], object], seconds: float = WAIT_SECONDS) -> None:
    """Wait until `is_so`."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"after {seconds:g} s still not: {what}"
        time.sleep(0.02)


# ---------------------------------------------------------------- run in another rank's process


def read_forever(path: Path):
    """A checkpoint on a disk that does not answer."""
    time.sleep(FOREVER)


def read_wrongly(path: Path):
    """A checkpoint that is damaged."""
    raise ValueError("the disk is on fire")


class Fail(NamedTuple):
    """A message that a rank cannot carry out."""

    def carry_out(self, memory) -> None:
        raise ValueError("no such block")


# ---------------------------------------------------------------- run in rank 0


class SlowlyStored:
    """A checkpoint of many tensors, each of which takes a while to read."""

    def __init__(self, path: Path, fails: bool = False) -> None:
        self.config, self.fails = DENSE.stored(path).config, fails

    def load(self, dtype, device, cut):
        for _ in range(int(FOREVER / 0.1)):
            cut.part_of("model.norm.weight", (1,), self.config)
            time.sleep(0.1)
            if self.fails:
                raise ValueError("the disk is on fire")
