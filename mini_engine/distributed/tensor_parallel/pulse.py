"""Lesson 18. Heartbeats: in each rank a thread increments a count in shared memory, whatever the rank is doing.

A process that was killed is noticed by its end. One that is stopped (SIGSTOP) does not end, and the others would wait
for it forever; but its count stops.

Silence is measured in ticks of the watcher's own thread, not by a clock. After Ctrl-Z, or when a laptop wakes up, the
clock has advanced while all ranks slept; the watcher's ticks have not.

A thread counts only while it gets Python's lock (GIL). A call into C that holds the lock, such as a long `sorted`,
looks like a stopped process; so the operating system is asked before a rank is given up.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn

from mini_engine.distributed.tensor_parallel.shared_block import CACHE_LINE, SharedBlock

TICK_SECONDS = 0.25
STOPPED_TICKS = 20  # of silence, after which a rank is lost if its process is stopped
SILENT_TICKS = 240  # after which it is lost even if its process seems to run
STRIDE = CACHE_LINE // 4


class Pulse:
    """One rank's view of all ranks' counts. One thread of the rank calls `tick` every TICK_SECONDS.

    Args:
        block: of `pulse_bytes(num_ranks)` bytes, the same in all ranks.

    Attributes:
        silence: for each rank, the number of ticks since its count last changed.
    """

    def __init__(self, rank: int, num_ranks: int, block: SharedBlock) -> None:
        self.rank = rank
        self.counts = block.buffer.cast("i")[::STRIDE]
        self.seen, self.silence = [0] * num_ranks, [0] * num_ranks

    def tick(self) -> None:
        """Increment this rank's count, and check those of all ranks."""
        self.counts[self.rank] += 1
        for rank, count in enumerate(self.counts):
            self.silence[rank] = 0 if count != self.seen[rank] else self.silence[rank] + 1
            self.seen[rank] = count

    def seconds_lost(self, rank: int, pid: int) -> float:
        """Return the seconds for which a rank has been silent if that is too long, otherwise 0.

        A rank that has not started counting may be importing torch from a slow disk; it is lost only if it is stopped.
        """
        ticks = self.silence[rank]
        if ticks < STOPPED_TICKS:
            return 0.0
        too_long = ticks >= SILENT_TICKS and self.seen[rank] > 0
        return ticks * TICK_SECONDS if too_long or is_stopped(pid) else 0.0


def live_with_parent(pulse: Pulse, silent: Callable[[float], object] | None = None) -> NoReturn:
    """Send heartbeats until the parent, rank 0, ends; then end this process, whatever it is doing.

    Args:
        silent: called with the seconds for which the parent has been silent, once that is too long.
    """
    parent = parent_process()
    assert parent is not None and parent.pid is not None
    while not wait([parent.sentinel], TICK_SECONDS):
        pulse.tick()
        if silent is not None and (seconds := pulse.seconds_lost(0, parent.pid)):
            silent(seconds)
    os._exit(0)


def pulse_bytes(num_ranks: int) -> int:
    """Return the size in bytes of the memory for the counts of `num_ranks` ranks, a cache line for each."""
    return num_ranks * CACHE_LINE


def is_stopped(pid: int) -> bool:
    """Return True if a process is stopped. False on Windows, which has no such signal, and if the process is gone."""
    if sys.platform == "win32":
        return False
    try:
        if sys.platform == "linux":
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            return stat.rpartition(")")[2].split()[0] == "T"
        state = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, encoding="utf-8").stdout
        return state.startswith("T")
    except OSError:
        return False
