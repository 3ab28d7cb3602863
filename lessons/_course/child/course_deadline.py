"""Course machinery. In a process under `check`: ends code that takes too long.

It is stopped by an exception inside it, so the traceback shows where it was. Code that cannot be stopped that way, such
as a wait for a lock or a loop that catches everything, ends the process after its place has been noted.
"""

import ctypes
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from time import monotonic, process_time
from types import FrameType

from course_calls import Place, in_words, own_calls, unended

LOOK_SECONDS = 0.1
GRACE_SECONDS = 3.0  # from the exception to the end of the process
IDLE_SECONDS = 60.0  # without processor time: nothing here waits that long
HUNG = 86  # the exit code


class TookTooLong(BaseException):
    """Raised in code that takes too long. A BaseException, so `except Exception` does not catch it.

    place: the call of the student's code that did not end in the second half of the time, if there is one.
    """

    place: Place | None = None
    limit = ""

    def __init__(self) -> None:  # it is raised as a class
        self.place = TookTooLong.place
        super().__init__(in_words(TookTooLong.limit, self.place))


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
        halfway: Sequence[FrameType] | None = None
        end = self.end
        while not self.over.wait(LOOK_SECONDS):
            now = process_time()
            if now > busy + 0.2:
                busy, last = now, monotonic()
            idle = monotonic() - last
            if now < self.end - self.seconds / 2 and idle < IDLE_SECONDS / 2:
                halfway = None  # a call that is kept keeps its variables
            elif halfway is None:  # this thread may come late to the look halfway; the second half is never shorter
                halfway, end = own_calls(self._frame()), max(self.end, now + self.seconds / 2)
            elif now > end or idle > IDLE_SECONDS:
                slow = f"took longer than {self.seconds:g} seconds of processor time"
                self._fire(slow if now > end else f"waited for {IDLE_SECONDS:g} seconds", halfway)
                break
        halfway = None
        if not self.over.wait(GRACE_SECONDS):
            self.give_up(traceback.extract_stack(self._frame()))

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self.thread)

    def _fire(self, limit: str, halfway: Sequence[FrameType]) -> None:
        with self.lock:
            if not self.over.is_set():
                TookTooLong.limit, TookTooLong.place = limit, unended(halfway, self._frame())
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread), ctypes.py_object(TookTooLong))


def tell_and_exit(stack: traceback.StackSummary) -> None:
    """Print where the thread is, as a traceback, and end the process."""
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(stack), f"TookTooLong: {TookTooLong()}\n"]
    os.write(2, "".join(lines).encode())
    os._exit(HUNG)
