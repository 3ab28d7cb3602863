"""Course machinery. In a process under `check`: ends code that does not finish.

A loop is stopped by an exception inside it, so the traceback shows where it was. Code that cannot be stopped that way,
such as a wait for a lock or a loop that catches everything, ends the process after its place has been noted.
"""

import ctypes
import os
import sys
import threading
import traceback
from collections.abc import Callable
from time import monotonic, process_time

LOOK_SECONDS = 0.1
GRACE_SECONDS = 3.0  # from the exception to the end of the process
IDLE_SECONDS = 60.0  # without processor time: nothing here waits that long
HUNG = 86  # the exit code


class TookTooLong(BaseException):
    """Raised in code that does not finish. A BaseException, so `except Exception` does not catch it."""


class Deadline:
    """Raises TookTooLong in the thread that entered it, after `seconds` of this process's processor time.

    Processor time, so that nothing fails because the machine is busy.

    Args:
        give_up: called with the thread's stack if the exception had no effect; must end the process.
    """

    def __init__(self, seconds: float, give_up: Callable[[traceback.StackSummary], None]) -> None:
        self.seconds = seconds
        self.give_up = give_up
        self.over = threading.Event()
        self.lock = threading.Lock()

    def __enter__(self) -> "Deadline":
        self.thread = threading.get_ident()
        self.end = process_time() + self.seconds
        threading.Thread(target=self._look, daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        with self.lock:
            self.over.set()

    def _look(self) -> None:
        busy, last = process_time(), monotonic()
        while not self.over.wait(LOOK_SECONDS):
            now = process_time()
            if now > busy + 0.2:
                busy, last = now, monotonic()
            if now > self.end or monotonic() > last + IDLE_SECONDS:
                self._fire()
                break
        if not self.over.wait(GRACE_SECONDS):
            self.give_up(traceback.extract_stack(sys._current_frames()[self.thread]))

    def _fire(self) -> None:
        with self.lock:
            if not self.over.is_set():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread), ctypes.py_object(TookTooLong))


def tell_and_exit(stack: traceback.StackSummary) -> None:
    """Print where the thread is, as a traceback, and end the process."""
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(stack), "TookTooLong\n"]
    os.write(2, "".join(lines).encode())
    os._exit(HUNG)
