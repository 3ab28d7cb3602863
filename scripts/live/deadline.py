"""Course machinery. Ends code that does not finish, without threads: counts its branches and calls.

Takes the place of lessons/_course/child/course_deadline.py in a page, with the same names. A loop that never enters
Python code again, such as `sum(itertools.count())`, can only be ended from outside: the page ends its worker.
"""

import sys
import traceback
from collections.abc import Callable, Sequence
from time import process_time
from types import FrameType
from typing import Any

from lessons._course.child.course_calls import Place, in_words, own_calls, unended

monitoring: Any = getattr(sys, "monitoring", None)  # from Python 3.12 on; a page has 3.14
HUNG = 86
EVERY = 2000  # events between two readings of the clock
TOOL = 4  # an id of sys.monitoring that no debugger, profiler or coverage tool uses


class TookTooLong(BaseException):
    """Raised in code that takes too long. A BaseException, so `except Exception` does not catch it.

    place: the call of the reader's code that did not end in the second half of the time, if there is one.
    """

    def __init__(self, seconds: float, place: Place | None) -> None:
        super().__init__(in_words(f"took longer than {seconds:g} seconds of processor time", place))
        self.place = place


class Deadline:
    """Raises TookTooLong in the code that it surrounds, after `seconds` of processor time. May be nested.

    Args:
        give_up: never called here; for code that catches everything, the page ends its worker.
    """

    def __init__(self, seconds: float, give_up: Callable[[traceback.StackSummary], None]) -> None:
        self.seconds = seconds
        self.events = 0
        self.halfway: Sequence[FrameType] | None = None

    def __enter__(self) -> "Deadline":
        self.end = process_time() + self.seconds
        self.is_inner = monitoring.get_tool(TOOL) is not None
        if not self.is_inner:
            watched = monitoring.events
            monitoring.use_tool_id(TOOL, "course deadline")
            for event in (watched.JUMP, watched.PY_START):
                monitoring.register_callback(TOOL, event, self.look)
            monitoring.set_events(TOOL, watched.JUMP | watched.PY_START)
        return self

    def __exit__(self, *exception) -> None:
        if not self.is_inner:
            monitoring.set_events(TOOL, 0)
            monitoring.free_tool_id(TOOL)

    def look(self, *where) -> None:
        """Called at each jump and each call of Python code."""
        self.events += 1
        if self.events % EVERY or (now := process_time()) < self.end - self.seconds / 2:
            return
        if self.halfway is None:
            self.halfway, self.end = own_calls(sys._getframe(1)), max(self.end, now + self.seconds / 2)
        elif now > self.end:
            self.end = now + 1  # code that catches this one gets another
            raise TookTooLong(self.seconds, unended(self.halfway, sys._getframe(1)))


def tell_and_exit(stack: traceback.StackSummary) -> None:
    """Never called in a page."""
