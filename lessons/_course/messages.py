"""Course machinery. Puts failures into plain words, and finds the lesson's pitfalls that they look like."""

import ast
import re
from itertools import takewhile

from lessons._course.catalog import Bug, Lesson
from lessons._course.headline import own_words
from lessons._course.output import value
from lessons._course.report import Failure, TestResult
from lessons._course.result import NOT_RAISED, sides_of
from lessons._course.statements import compares_returned

MOST_LINES = 6
MOST_PITFALLS = 3
TELLING = 12  # a symptom with fewer letters fits failures of any kind
FROM_HYPOTHESIS = re.compile(r"Falsifying |Failing |Draw \d|You can |Explanation:|state = |.*hypothesis", re.IGNORECASE)
NOISE = re.compile(
    r"\s*(Use -v|\++ +(where|and) |(assert )?\(?False\)?$|(not tensor\(True\)|tensor\(False\))$|Tensor-likes are"
    r"|Greatest relative difference|Your code: |Expected:  |Expected regex: |Actual message: "
    r"|At index \d+: (.+), expected (.+)$)"
)
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
    is_phrase = len(re.sub(r"\W", "", bug.symptom)) > TELLING and not NOT_RAISED.match(failure.message)
    return is_phrase or result.test.partition("[")[0] in bug.tests


def likely_bugs(lesson: Lesson, result: TestResult) -> list[Bug]:
    """Return the pitfalls that this result shows. None instead of a value is a forgotten `return`, not a pitfall."""
    if result.failure and sides_of(result.failure)[0] == "None":
        return []
    return [bug for bug in lesson.bugs if shows(bug, result)]


def general_hints(failure: Failure) -> list[str]:
    """Say in at most one line what usually causes such an error. Assertions carry their own explanation."""
    if failure.type == "AssertionError" and not compares_returned(failure):
        return []
    patterns = HINTS[:1] if failure.type == "AssertionError" else HINTS
    return [text for pattern, text in patterns if re.search(pattern, failure.text)][:1]


def remarks(failure: Failure) -> list[str]:
    """Return what the failure says beyond its headline: further lines of its message, notes, the first difference."""
    if NOT_RAISED.match(failure.message):
        return []
    if failure.type != "AssertionError":
        lines = failure.message.splitlines()[1:]
    else:
        compared = f"\n{failure.message}".partition("\nassert ")[2].splitlines()
        got, expected = sides_of(failure)
        lines = own_words(failure)[1:] + ([] if got or expected else untrue(compared[:1])) + compared[1:]
        if failure.tensors:
            lines = own_words(failure)[1:] + failure.tensors[2:]
        elif len(got) + len(expected) > 80 and (place := re.search(r"^At index .+", "\n".join(compared), re.MULTILINE)):
            lines.append(value(f"{place[0]}.", 160))
    lines = [*tests_notes(failure), *lines]
    lines = [value(line, 160) for line in lines if line.strip() and not NOISE.match(line)]
    return lines[:MOST_LINES] + (
        [f"… {len(lines) - MOST_LINES} more lines: --verbose"] if len(lines) > MOST_LINES else []
    )


def untrue(compared: list[str]) -> list[str]:
    """Return what an assertion found untrue, unless it says nothing to a reader: `False`, an object's address."""
    texts = [without_parentheses(line) for line in compared]
    told = [text for text in texts if not NOISE.match(text) and text != "not True" and " object at 0x" not in text]
    return [f"This must be empty: {text[4:]}" if is_not_empty(text) else f"Not true: {text}" for text in told]


def is_not_empty(text: str) -> bool:
    """Whether an assertion was `not something`, of a list, a dictionary and so on."""
    try:
        return text.startswith("not ") and isinstance(ast.literal_eval(text[4:]), list | tuple | dict | set | str)
    except (SyntaxError, ValueError):
        return False


def without_parentheses(text: str) -> str:
    """Return an expression without the parentheses around the whole of it."""
    try:
        is_inside = ast.parse(text, mode="eval").body.col_offset > 0
    except SyntaxError:  # a repr such as <Request 3>
        return text
    return text[1:-1] if is_inside and text[0] == "(" and text[-1] == ")" else text


def tests_notes(failure: Failure) -> list[str]:
    """Return the notes that the test itself added to the exception; hypothesis' come after them."""
    return list(takewhile(lambda line: not FROM_HYPOTHESIS.match(line), failure.notes.splitlines()))


def counted(count: int, noun: str) -> str:
    """Return "1 test", "2 tests"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
