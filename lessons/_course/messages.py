"""Course machinery. What failures mean in plain words, and which of a lesson's pitfalls they look like."""

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
        "A None was used as if it were a value: does every path of your function end in a `return`?",
    ),
    (
        r"takes \d+ positional argument|missing \d+ required|unexpected keyword argument",
        "A function was called with other arguments than its `def` takes: compare it with the starter's.",
    ),
    (
        r"IndexError: too many indices|shape mismatch|must match|size of tensor|not broadcastable|Expected size",
        "Two shapes do not fit: print both shapes just before that line, and compare with 'Shapes' on the page.",
    ),
    (
        r"expected .*(Long|Int)|tensors used as indices must be|dtype",
        "A tensor has another dtype than is needed here: torch indices are int64, a kernel's tables int32.",
    ),
    (r"RecursionError", "A function calls itself without end: `return` before the call, or call another one."),
    (
        r"ModuleNotFoundError|cannot import name",
        "An import does not find its module: the starter's imports are enough.",
    ),
)


def is_hang(result: TestResult) -> bool:
    return result.outcome == "hung" or (result.failure is not None and result.failure.type == "TookTooLong")


def shows(bug: Bug, result: TestResult) -> bool:
    """Whether a failed test is one of the bug's own and says what the bug's symptom is."""
    if result.failure is None or result.test.partition("[")[0] not in bug.tests:
        return False
    return re.search(bug.symptom, f"{result.test}\n{result.failure.text}") is not None


def likely_bugs(lesson: Lesson, results: list[TestResult]) -> list[Bug]:
    """The pitfalls of which one of these is the own test, and shows the symptom."""
    return [bug for bug in lesson.bugs if any(shows(bug, result) for result in results)]


def general_hints(failure: Failure) -> list[str]:
    """What an error of this kind mostly means; at most one line. An assertion says itself what it means."""
    patterns = HINTS[:1] if failure.type == "AssertionError" else HINTS
    return [text for pattern, text in patterns if re.search(pattern, failure.text)][:1]


def said(failure: Failure) -> list[str]:
    """The failure's own words: the teaching message of an assertion, then what was compared; shortened."""
    words, _, compared = failure.message.partition("\nassert ")
    if failure.type != "AssertionError":
        kind = "" if failure.type == "Crash" else f"{failure.type}: "
        words, compared = f"{kind}{failure.message}".removesuffix(": "), ""
        if missing := NOT_RAISED.match(failure.message):
            words = f"Nothing was raised, and {missing[1]} must be."
    lines = words.splitlines()
    if compared:
        lines += ["  " + line for line in ("assert " + compared).splitlines()]
    if failure.notes:
        lines += ["  " + line for line in failure.notes.splitlines()]
    lines = [line for line in lines if line.strip() and not NOISE.match(line)]
    return lines[:MOST_LINES] + (
        [f"  … {len(lines) - MOST_LINES} more lines: --verbose"] if len(lines) > MOST_LINES else []
    )


def in_words(test: str) -> str:
    """`tests/l2/test_pool.py::test_set_kv_writes_only[2]` as "set kv writes only (2)"."""
    name = test.rpartition("::")[2]
    name, _, parameter = name.partition("[")
    words = name.removeprefix("test_").replace("_", " ")
    return f"{words} ({parameter.rstrip(']')})" if parameter else words
