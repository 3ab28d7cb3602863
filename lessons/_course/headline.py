"""Course machinery. Says in half a sentence what a failed test found: what was compared, or what should have raised."""

import re
from collections.abc import Collection
from pathlib import PureWindowsPath

from lessons._course.catalog import Target
from lessons._course.output import value
from lessons._course.report import Failure, TestResult
from lessons._course.result import NOT_RAISED, sides_of
from lessons._course.statements import asserted_text, called_to_raise, expected_error, subject_of

LONGEST = 200
SHORT = 80  # both sides of a comparison together, to be told in the headline
TOLD_BY_LIBRARIES = re.compile(r"(Tensor-likes|Scalars|Sequences) are not (close|equal)|Regex pattern did not match")


def is_hang(result: TestResult) -> bool:
    return result.outcome == "hung" or (result.failure is not None and result.failure.type == "TookTooLong")


def happened(result: TestResult, targets: Collection[Target] = ()) -> str:
    """Return what went wrong, as the end of a sentence that begins with a task, which has these targets."""
    failure = result.failure
    if is_hang(result):
        return "does not finish."
    if failure is None:
        return "fails a test."
    if NOT_RAISED.match(failure.message):
        return f"is not right yet: {not_raised(failure, targets)}"
    if failure.type == "Crash":
        return f"ends Python itself: {cause(failure)}"
    if failure.type in ("AssertionError", "Failed"):
        return f"is not right yet: {claim(failure)}"
    where = f" where {expected} is expected." if (expected := expected_error(failure)) else ""
    return f"{'raises' if failure.frames else 'ends in'} {cause(failure)}{where}"


def not_raised(failure: Failure, targets: Collection[Target]) -> str:
    """Return which call had to raise what. A method of the task is told by its class, not by the object in the test."""
    name, arguments = called_to_raise(failure)
    symbol = next((each.symbol for each in targets if each.symbol.rpartition(".")[2] == name.rpartition(".")[2]), "")
    called = f"`{symbol or name}{arguments}`" if name else "a call in the test"
    return f"{called} must raise {sides_of(failure)[1]}, and raises nothing."


def claim(failure: Failure) -> str:
    """Return an assertion's own message, or else what was compared."""
    own = own_words(failure)
    if own and not TOLD_BY_LIBRARIES.match(own[0]):
        return value(own[0])
    (got, expected), subject = sides_of(failure), subject_of(failure)
    if own and "Regex" in own[0]:
        return f"the error must say something that matches {expected}, and says {got}."
    if got and expected and len(got) + len(expected) < SHORT:
        return f"{f'`{subject}`' if subject else 'a value'} is {got}, expected: {expected}."
    if subject:
        return f"`{subject}` is not what the test expects."
    test = asserted_text(failure)
    return f"this does not hold: `{test}`." if test else f"a test expects something else at {place(failure)}."


def place(failure: Failure) -> str:
    """Return the innermost line that failed, as `test_seats.py:12`."""
    path, line, *_ = failure.frames[-1] if failure.frames else ("an unknown line", 0)
    return f"{PureWindowsPath(path).name}:{line}" if line else path  # it knows both kinds of slashes


def own_words(failure: Failure) -> list[str]:
    """Return the lines of an assertion's own message, without what pytest adds about the comparison."""
    words = f"\n{failure.message}".partition("\nassert ")[0]
    return [line for line in words.splitlines() if line.strip()]


def cause(failure: Failure) -> str:
    """Return the exception as Python shows it, in one line."""
    kind = "" if failure.type in ("Crash", "Failed") else f"{failure.type}: "
    first = (failure.message.splitlines() or [""])[0]
    return value(f"{kind}{first}".removesuffix(": "), LONGEST)
