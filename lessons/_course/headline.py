"""Course machinery. Says in half a sentence what a failed test found: what was compared, or what should have raised."""

from collections.abc import Collection
from pathlib import PureWindowsPath

from lessons._course.catalog import Target
from lessons._course.output import both, value
from lessons._course.report import Failure, TestResult

LONGEST = 200
KILLED = "was still running when the time for the whole check was over."
SHORT = 80  # both sides of a comparison together, to be told in the headline


def is_hang(result: TestResult) -> bool:
    return result.outcome == "hung" or (result.failure is not None and result.failure.type == "TookTooLong")


def happened(result: TestResult, targets: Collection[Target] = ()) -> str:
    """Return what went wrong, as the end of a sentence that begins with a task, which has these targets."""
    failure = result.failure
    if is_hang(result):
        return f"{limit_of(failure)}." if failure else KILLED
    if failure is None:
        return "fails a test."
    if failure.type == "Crash":
        return f"ends Python itself: {cause(failure)}"
    if failure.is_assertion:
        return f"is not right yet: {finding(failure, targets)}"
    where = f" where {failure.must_raise} is expected." if failure.must_raise else ""
    return f"{'raises' if failure.frames else 'ends in'} {cause(failure)}{where}"


def finding(failure: Failure, targets: Collection[Target]) -> str:
    """Return what a test found: in its own words, or else what should have raised, or what was compared."""
    if failure.words:
        return value(failure.words[0])
    (got, expected), subject = both(failure.got, failure.expected), failure.subject
    if failure.must_raise:
        if failure.type == "AssertionError":
            return f"the error must say something that matches {expected}, and says {got}."
        return value(failure.own_notes[0]) if failure.own_notes else not_raised(failure, targets)
    if got and expected and len(got) + len(expected) < SHORT:
        return f"{f'`{subject}`' if subject else 'a value'} is {got}, expected: {expected}."
    if subject:
        return f"`{subject}` is not what the test expects."
    if failure.claim:
        return f"this does not hold: `{failure.claim}`."
    return f"a test expects something else at {place(failure)}."


def not_raised(failure: Failure, targets: Collection[Target]) -> str:
    """Return which call had to raise what. A method of the task is told by its class, not by the object in the test."""
    name, arguments = failure.called
    symbol = next((each.symbol for each in targets if each.symbol.rpartition(".")[2] == name.rpartition(".")[2]), "")
    called = f"`{symbol or name}{arguments}`" if name else "a call in the test"
    return f"{called} must raise {failure.must_raise}, and raises nothing."


def limit_of(failure: Failure) -> str:
    """Return which limit a test has reached, without the call that did not end."""
    return failure.message.partition(", at least half of it")[0]


def place(failure: Failure) -> str:
    """Return the innermost line that failed, as `test_seats.py:12`."""
    path, line, *_ = failure.frames[-1] if failure.frames else ("an unknown line", 0)
    return f"{PureWindowsPath(path).name}:{line}" if line else path  # it knows both kinds of slashes


def cause(failure: Failure) -> str:
    """Return the exception as Python shows it, in one line."""
    kind = "" if failure.type in ("Crash", "Failed") else f"{failure.type}: "
    first = (failure.message.splitlines() or [""])[0]
    return value(f"{kind}{first}".removesuffix(": "), LONGEST)
