"""Course machinery. Puts failures into plain words, and finds the lesson's pitfalls that they look like."""

import re

from lessons._course.catalog import Bug, Lesson
from lessons._course.output import value
from lessons._course.report import Failure, TestResult

MOST_LINES = 6
MOST_PITFALLS = 3
TELLING = 12  # a symptom with fewer letters fits failures of any kind
HINTS = (
    (
        r"NoneType",
        "None was used as a value: does every path through your function end in a `return`?",
    ),
    (
        r"takes \d+ positional argument|missing \d+ required|unexpected keyword argument",
        "A call does not fit the function's `def`: an argument is missing, or is one that it does not take.",
    ),
    (
        r"IndexError: too many indices|shape mismatch|must match|size of tensor|not broadcastable|Expected size",
        "Two shapes do not match: print both just before that line and compare them with 'Shapes' on the page.",
    ),
    (
        r"same dtype|scalar type \w*(Float|Half|Double) but found \w*(Float|Half|Double)",
        "Two floating-point dtypes meet in one operation: cast one side to the dtype that the docstring names.",
    ),
    (
        r"expected .*(Long|Int)|tensors used as indices must be|dtype",
        "A tensor has the wrong dtype: torch indices are int64, a kernel's tables int32.",
    ),
    (r"RecursionError", "A function calls itself forever: `return` before the call, or call a different one."),
    (r"reading from stdin|EOFError", "`input()` waits for typing, and nothing types during a check: remove it."),
    (r"SystemExit|leaves Python", "Remove the call of `exit()`: a module is imported and called, never ended."),
    (
        r"ModuleNotFoundError|cannot import name",
        "An import fails: the starter's imports are all you need.",
    ),
)


def shows(bug: Bug, result: TestResult) -> bool:
    """Whether a failed test's output matches the bug's symptom.

    In a test that is not the bug's own, the symptom must be a whole phrase: `int32` or a missing exception fits many.
    """
    failure = result.failure
    if failure is None or not re.search(bug.symptom, failure.text):
        return False
    is_phrase = len(re.sub(r"\W", "", bug.symptom)) > TELLING and not failure.must_raise
    return is_phrase or result.test.partition("[")[0] in bug.tests


def likely_bugs(lesson: Lesson, result: TestResult) -> list[Bug]:
    """Return the pitfalls that this result shows. None instead of a value is a forgotten `return`, not a pitfall."""
    if result.failure and result.failure.got == "None":
        return []
    return [bug for bug in lesson.bugs if shows(bug, result)]


def general_hints(failure: Failure) -> list[str]:
    """Say in at most one line what usually causes such an error. Assertions carry their own explanation."""
    if failure.is_assertion:
        is_returned = failure.subject.endswith(")") and ".get(" not in failure.subject  # `get`: it is not there
        return [HINTS[0][1]] if failure.got == "None" and is_returned else []
    return [text for pattern, text in HINTS if re.search(pattern, failure.text)][:1]


def remarks(failure: Failure) -> list[str]:
    """Return what the failure says beyond its headline: its notes, further lines of its message, the difference."""
    notes = failure.own_notes
    if not failure.is_assertion:
        lines = [*notes, *failure.message.splitlines()[1:]]
    elif failure.must_raise and not failure.words:
        lines = notes[1:]
    else:
        lines = [*notes, *failure.words[1:], failure.difference]
    lines = [value(line, 160) for line in lines if line.strip()]
    left = len(lines) - MOST_LINES
    return lines[:MOST_LINES] + ([f"… {left} more lines: --verbose"] if left > 0 else [])


def counted(count: int, noun: str) -> str:
    """Return "1 test", "2 tests"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
