"""Course machinery. In a process under `check`: keeps, as objects, the two sides of what a test found untrue.

A test compares what the code gave with what it knows: `got == expected`, `got < most`, `expected in got`. pytest hands
over both sides of a comparison that failed. It shows only the outcome of torch's comparisons and of `pytest.raises`, so
these are wrapped while a test runs.
"""

import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from course_statement import Statement, is_ours

LONGEST_VALUE = 2000
SHORT = 80  # two sides of fewer characters are read at a glance
SMALL = 8  # elements: a smaller tensor is shown whole


class Sides(NamedTuple):
    """What the code gave and what the test expects, as text; empty if nothing was compared.

    difference: where the two first differ, if that is hard to see.
    must_raise: the exceptions of which one was to be raised.
    """

    got: str = ""
    expected: str = ""
    difference: str = ""
    must_raise: str = ""


class LastSides:
    """The last sides that one test found to be unlike. A context manager, around the test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.place: tuple[str, int] | None = None
        self.show: Callable[[], Sides] = Sides
        self.raised: tuple[BaseException | None, Sides] = None, Sides()

    def __enter__(self) -> "LastSides":
        self.patches, torch = ExitStack(), sys.modules.get("torch")
        self.patches.enter_context(patch.object(pytest.RaisesExc, "__exit__", self._raises(pytest.RaisesExc.__exit__)))
        if torch:
            for name in ("equal", "allclose"):
                self.patches.enter_context(patch.object(torch, name, self._compares(getattr(torch, name))))
            close = self._asserts(torch.testing.assert_close)
            self.patches.enter_context(patch.object(torch.testing, "assert_close", close))
        return self

    def __exit__(self, *exception: object) -> None:
        self.patches.close()

    def note(self, show: Callable[[], Sides]) -> None:
        """Keep what was compared, and the line of the course's files that compares it."""
        frame = sys._getframe(1)
        while frame.f_back and not is_ours(Path(frame.f_code.co_filename), self.root):
            frame = frame.f_back
        self.place, self.show = (frame.f_code.co_filename, frame.f_lineno), show

    def of(self, error: BaseException, statement: Statement | None) -> Sides:
        """Return the sides that a failure is about. statement: the innermost of the course's that failed."""
        if self.raised[0] is error:
            return self.raised[1]
        if isinstance(error, AssertionError) and self.place and statement and statement.holds(*self.place):
            sides = self.show()
            return Sides(difference=f"Not true: {sides.got} {sides.expected}") if statement.is_chain else sides
        return Sides()

    def _compares(self, compare: Callable[..., bool]) -> Callable[..., bool]:
        @wraps(compare, updated=())
        def remember(one, other, *args, **options) -> bool:
            is_equal = compare(one, other, *args, **options)
            if not is_equal:
                self.note(lambda: of_tensors(one, other, args, options))
            return is_equal

        remember.__qualname__ = remember.__name__
        return remember

    def _asserts(self, assert_close: Callable[..., None]) -> Callable[..., None]:
        @wraps(assert_close)
        def remember(actual, expected, msg: str | Callable[[str], str] = "", **options) -> None:
            """Compare; what torch says is replaced by the sides, what the test says stays."""
            try:
                assert_close(actual, expected, **options)
            except AssertionError:
                self.note(lambda: of_tensors(actual, expected, (), options))
                raise AssertionError((msg("") if callable(msg) else msg).rstrip(" :\n")) from None

        return remember

    def _raises(self, leave: Callable[..., bool]) -> Callable[..., bool]:
        def remember(
            raises: Any, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> bool:
            names = " or ".join(expected.__name__ for expected in raises.expected_exceptions)
            try:
                is_met = leave(raises, kind, error, trace)
            except BaseException as unmet:  # nothing was raised, or something that `match` does not find
                got, wanted = (value(str(error)), value(raises.match.pattern)) if error else ("no exception", names)
                self.raised = unmet, Sides(got, wanted, must_raise=names)
                raise
            if not is_met:
                self.raised = error, Sides(must_raise=names)
            return is_met

        return remember


def of_comparison(op: str, left: object, right: object) -> Sides:
    """Return the sides of `left op right`: a test has what the code gave on the left, but `expected in got`."""
    one, other = value(left), value(right)
    if op in ("in", "not in"):
        return Sides(other, f"{'something with' if op == 'in' else 'something without'} {one}")
    if op == "is" and one == other:
        return Sides(one, "the same object, not another one that is equal")
    if op not in ("==", "is"):
        return Sides(one, f"{op} {other}")
    is_long = len(one) + len(other) > SHORT
    return Sides(one, other, first_difference(left, right) if is_long else "")


def first_difference(left: object, right: object) -> str:
    """Say at which index two sequences differ; of other values nothing."""
    if not (isinstance(left, list | tuple) and isinstance(right, list | tuple)):
        return ""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one is not other and not is_equal(one, other):
            return f"At index {index}: {value(one)}, expected {value(other)}"
    return f"Its length is {len(left)}, expected {len(right)}" if len(left) != len(right) else ""


def of_tensors(one: Any, other: Any, args: tuple, options: dict[str, Any]) -> Sides:
    """Return both values at the first place where two tensors differ, and how many differ; else shapes and dtypes."""
    if getattr(one, "shape", 0) != getattr(other, "shape", 1) or one.dtype != other.dtype:
        return Sides(*(kind(each) if hasattr(each, "shape") else value(each) for each in (one, other)))
    near = {name: given for name, given in options.items() if name in ("rtol", "atol", "equal_nan")}
    is_near = (args or options) and one.is_floating_point()
    unequal = ~one.isclose(other, *args, **near) if is_near else one != other
    count = f"{int(unequal.sum())} of {unequal.numel()} values differ ({kind(one)})."
    if one.numel() <= SMALL or not unequal.any():
        return Sides(value(one), value(other), count)
    at = tuple(unequal.nonzero()[0].tolist())
    return Sides(f"{one[at].item()} at {list(at)}", f"{other[at].item()} at {list(at)}", count)


def kind(tensor: Any) -> str:
    """Return "float32 of shape (2, 3)"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def is_equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except Exception:  # a tensor of several elements, for instance
        return value(one) == value(other)


def value(thing: object) -> str:
    """Return a value's repr in one line, without the spaces that align a tensor; whole, unless it is huge."""
    try:
        text = re.sub(r"\n\s*", " ", repr(thing))
    except Exception as error:
        text = f"<{type(thing).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]} …"
