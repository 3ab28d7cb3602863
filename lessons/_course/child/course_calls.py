"""Course machinery. In a process under `check`: the call of the student's code that has not ended for a long time.

That a test takes long says nothing about whose fault it is; that one call of a function did not end meanwhile does.
"""

import json
import os
from collections.abc import Sequence
from types import FrameType

OVERLAY = "KV_COURSE_OVERLAY"

Place = tuple[str, int, str]  # file, line, function


def own_calls(frame: FrameType | None) -> list[FrameType]:
    """Return the calls of the student's functions that are running in a stack, the innermost first."""
    files, found = set(json.loads(os.environ.get(OVERLAY, "{}")).values()), []
    while frame:
        if frame.f_code.co_filename in files:
            found.append(frame)
        frame = frame.f_back
    return found


def unended(before: Sequence[FrameType], frame: FrameType | None) -> Place | None:
    """Return the innermost call that was running `before` and still is; None if there is none."""
    for call in own_calls(frame):
        if any(call is other for other in before):
            return call.f_code.co_filename, call.f_lineno, call.f_code.co_name
    return None


def in_words(limit: str, place: Place | None) -> str:
    """Return what is known of code that was stopped at a limit. A place is written as in a traceback."""
    if place is None:
        return limit
    return f'{limit}, at least half of it in one call: File "{place[0]}", line {place[1]}, in {place[2]}'
