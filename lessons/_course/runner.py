"""Course machinery. Runs a Python process with a time limit, and ends it together with its children."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

POLL_SECONDS = 0.05


class Job(Protocol):
    """A running process: a Popen, or one forked from a warm process."""

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""

    def kill(self) -> None:
        """Kill the process and its children."""


class Command(NamedTuple):
    """Python's arguments, additional environment variables, the working directory, and the output files."""

    arguments: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    stdout: Path
    stderr: Path


Launch = Callable[[Command], Job]


@contextlib.contextmanager
def starting(job: Job) -> Iterator[None]:
    """Let Ctrl-C wait until `job` has started, then kill it first: as yet no one else could."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    pressed = []
    signal.signal(signal.SIGINT, lambda *of: pressed.append(of))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pressed:
        job.kill()
        handler(*pressed[0])


class Spawned:
    """A process in its own process group, so that its children can be killed with it."""

    def __init__(self, command: Command) -> None:
        flags = subprocess.CREATE_NEW_PROCESS_GROUP if sys.platform == "win32" else 0
        with starting(self), command.stdout.open("wb") as out, command.stderr.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, *command.arguments],
                cwd=command.cwd,
                env=os.environ | command.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                creationflags=flags,
                start_new_session=sys.platform != "win32",
            )

    def poll(self) -> int | None:
        return self.process.poll()

    def kill(self) -> None:
        if sys.platform == "win32":
            subprocess.run(["taskkill", "/F", "/T", "/PID", str(self.process.pid)], capture_output=True, check=False)
        else:
            kill_group(self.process.pid)
        self.process.wait()


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS raises the latter if the group just ended
        os.killpg(pid, signal.SIGKILL)


def run_until(
    job: Job, deadline: float, each: Callable[[], None], is_done: Callable[[], bool] = lambda: False
) -> int | None:
    """Wait for `job`, calling `each` meanwhile. Return the exit code, or None after `deadline` (monotonic).

    The job is killed however this function is left, Ctrl-C included. is_done: ends the wait early, as if in time.
    """
    try:
        while (code := job.poll()) is None and time.monotonic() < deadline and not is_done():
            each()
            time.sleep(POLL_SECONDS)
        each()
        return code
    finally:
        if job.poll() is None:
            job.kill()
