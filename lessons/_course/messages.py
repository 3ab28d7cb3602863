"""Course machinery. Puts failures into plain words, and finds the lesson's pitfalls that they look like."""

import re

from lessons._course.catalog import Bug, Lesson
from lessons._course.report import Failure, TestResult

MOST_LINES = 12
MOST_PITFALLS = 3
NOISE = re.compile(r"\s*(Use -v|\+ +(where|and) |assert \(?False\)?$)")
NOT_RAISED = re.compile(r"DID NOT RAISE (?:<class ')?([\w.]+)")
HINTS = (
    (
        r"'NoneType' object|NoneType|^AssertionError(.|\n)*\nassert None (==|is)",
        "None was used as a value: does every path through your function end in a `return`?",
    ),
    (
        r"takes \d+ positional argument|missing \d+ required|unexpected keyword argument",
        "A function was called with arguments that its `def` does not take: compare it with the starter's.",
    ),
    (
        r"IndexError: too many indices|shape mismatch|must match|size of tensor|not broadcastable|Expected size",
        "Two shapes do not match: print both just before that line and compare them with 'Shapes' on the page.",
    ),
    (
        r"expected .*(Long|Int)|tensors used as indices must be|dtype",
        "A tensor has the wrong dtype: torch indices are int64, a kernel's tables int32.",
    ),
    (r"RecursionError", "A function calls itself forever: `return` before the call, or call a different one."),
    (
        r"ModuleNotFoundError|cannot import name",
        "An import fails: the starter's imports are all you need.",
    ),
)


def is_hang(result: TestResult) -> bool:
    return result.outcome == "hung" or (result.failure is not None and result.failure.type == "TookTooLong")


def shows(bug: Bug, result: TestResult) -> bool:
    """Whether a failed test is one of the bug's own tests and its output matches the bug's symptom."""
    if result.failure is None or result.test.partition("[")[0] not in bug.tests:
        return False
    return re.search(bug.symptom, f"{result.test}\n{result.failure.text}") is not None


def likely_bugs(lesson: Lesson, results: list[TestResult]) -> list[Bug]:
    """Return the pitfalls that at least one of these results shows."""
    return [bug for bug in lesson.bugs if any(shows(bug, result) for result in results)]


def general_hints(failure: Failure) -> list[str]:
    """Say in at most one line what usually causes such an error. Assertions carry their own explanation."""
    patterns = HINTS[:1] if failure.type == "AssertionError" else HINTS
    return [text for pattern, text in patterns if re.search(pattern, failure.text)][:1]


def said(failure: Failure) -> list[str]:
    """Return the failure's own words: an assertion's message, then what it compared, shortened."""
    words, _, compared = f"\n{failure.message}".partition("\nassert ")
    words = words.removeprefix("\n")
    if failure.type != "AssertionError":
        kind = "" if failure.type == "Crash" else f"{failure.type}: "
        words, compared = f"{kind}{failure.message}".removesuffix(": "), ""
        if missing := NOT_RAISED.match(failure.message):
            words = f"Your code raised nothing; expected {missing[1]}."
    lines = words.splitlines()
    if compared:
        lines += ["  " + line for line in sides(compared)]
    if failure.notes:
        lines += ["  " + line for line in failure.notes.splitlines()]
    lines = [line for line in lines if line.strip() and not NOISE.match(line)]
    return lines[:MOST_LINES] + (
        [f"  … {len(lines) - MOST_LINES} more lines: --verbose"] if len(lines) > MOST_LINES else []
    )


def sides(compared: str) -> list[str]:
    """Label the two sides of an `==`, which the course's tests write as `result == expected`; else return the text."""
    first, *rest = compared.splitlines()
    mine, equals, expected = first.partition(" == ")
    if not equals or " == " in expected or mine.count("(") != mine.count(")"):
        return ["assert " + first, *rest]
    return [f"Your code: {mine}", f"Expected:  {expected}", *map(relabeled, rest)]


def relabeled(line: str) -> str:
    """Replace pytest's "Left" and "Right"."""
    return re.sub(
        r"^(\s*)(Left|Right) contains",
        lambda match: match[1] + {"Left": "Your code's", "Right": "The expected one"}[match[2]] + " contains",
        line,
    )


def counted(count: int, noun: str) -> str:
    """Return "1 test", "2 tests"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def in_words(test: str) -> str:
    """Return `tests/l2/test_pool.py::test_set_kv_writes_only[2]` as "set kv writes only (2)"."""
    name = test.rpartition("::")[2]
    name, _, parameter = name.partition("[")
    words = name.removeprefix("test_").replace("_", " ")
    return f"{words} ({parameter.rstrip(']')})" if parameter else words
