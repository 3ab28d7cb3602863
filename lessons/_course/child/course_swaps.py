"""Course machinery. In a process under `check`: finds by experiment which function makes a test fail.

The test runs again with one of the student's functions replaced by the reference's. If it passes then, this function is
the cause, whichever task the test belongs to. Only the function's code is exchanged, so that everything that refers to
it, such as a test that imported it by name, gets the other one.

KV_COURSE_SWAPS is a JSON list of what can be exchanged, with the fields of Swap.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from types import CodeType, FunctionType

SWAPS = "KV_COURSE_SWAPS"


@dataclass(frozen=True)
class Swap:
    """A function that can be exchanged. file: the reference's."""

    task: int
    symbol: str
    module: str
    file: str

    @contextlib.contextmanager
    def done(self) -> Iterator[bool]:
        """Exchange the function's code for the `with` block; yield whether that was possible."""
        mine, theirs = function_of(self.module, self.symbol), reference_code(self.file, self.symbol)
        if mine is None or theirs is None or mine.__code__.co_freevars != theirs.co_freevars:
            yield False
            return
        before, mine.__code__ = mine.__code__, theirs
        try:
            yield True
        finally:
            mine.__code__ = before


class Experiments:
    """Finds the function that makes a test fail, as long as there is time.

    Args:
        seconds: of processor time, for all experiments of a check together; none begins later.
    """

    def __init__(self, seconds: float) -> None:
        self.swaps = [Swap(**fields) for fields in json.loads(os.environ.get(SWAPS, "[]"))]
        self.left = seconds

    def cause_of(self, task: int | None, passes: Callable[[], bool]) -> Swap | None:
        """Return the first swap with which the test passes: those of its own task first, then task by task.

        Args:
            task: the test's own, if any.
            passes: runs the test again.
        """
        for swap in sorted(self.swaps, key=lambda swap: swap.task != task):
            if self.left <= 0:
                return None
            begun = process_time()
            with swap.done() as is_done:
                found = is_done and passes()
            self.left -= process_time() - begun
            if found:
                return swap
        return None


@contextlib.contextmanager
def as_found(item) -> Iterator[None]:
    """Keep hypothesis from making failing examples small, which takes seconds, where only the outcome counts."""
    is_machine = hasattr(getattr(item, "cls", None), "settings")
    owner, name = (item.cls, "settings") if is_machine else (item.obj, "_hypothesis_internal_use_settings")
    before = getattr(owner, name, None)
    if before is None:
        yield
        return
    from hypothesis import Phase, settings

    setattr(owner, name, settings(before, phases=set(before.phases) - {Phase.shrink, Phase.explain}))
    try:
        yield
    finally:
        setattr(owner, name, before)


def function_of(module: str, symbol: str) -> FunctionType | None:
    """Return the plain function called `symbol`, without its decorators; None if there is none."""
    found = sys.modules.get(module)
    for name in symbol.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    while inside := [getattr(found, name) for name in ("__wrapped__", "__func__", "fget") if hasattr(found, name)]:
        found = inside[0]
    return found if isinstance(found, FunctionType) else None


def reference_code(file: str, symbol: str) -> CodeType | None:
    """Return the code of the function called `symbol` in a file, without running any of it."""
    left = [compile(Path(file).read_text(encoding="utf-8"), file, "exec", dont_inherit=True)]
    while left:
        code = left.pop()
        if code.co_qualname == symbol:
            return code
        left += [part for part in code.co_consts if isinstance(part, CodeType)]
    return None
