"""Course machinery. In a process under `check`: describes a failed test as data, for `check` to explain."""

import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from course_sides import LastSides, value
from course_statement import Statement, is_ours, lines_to, statement_at
from pytest import fail

Failed = fail.Exception

TASK = re.compile(r"Lesson \d+, task (\d+)\b")
LONGEST_TEXT = 6000
MOST_LINES = 12


def describe(error: BaseException, node: Any, seen: LastSides) -> dict[str, Any]:
    """Describe a failure: what it says, the unwritten task it ran into, its traceback, what the test did and expects.

    seen: the sides that the test has found to be unlike.
    """
    error = heart_of(error)
    task = next((m[1] for e in chain(error) if isinstance(e, NotImplementedError) and (m := TASK.search(str(e)))), None)
    stack = traceback.extract_tb(error.__traceback__)
    failing = innermost(stack, node)
    return {
        "type": type(error).__name__,
        "message": str(error)[:LONGEST_TEXT],
        "words": own_words(error, seen),
        "notes": "\n".join(getattr(error, "__notes__", ()))[:LONGEST_TEXT],
        "task": int(task) if task else None,
        "place": getattr(error, "place", None),
        "syntax": [error.filename, error.lineno] if isinstance(error, SyntaxError) else None,
        **seen.of(error, failing)._asdict(),
        **where(stack, node),
    }


def own_words(error: BaseException, seen: LastSides) -> list[str]:
    """Return what a test itself says about its failure, without what pytest adds about the comparison."""
    if not isinstance(error, AssertionError | Failed) or seen.raised[0] is error:
        return []
    words = f"\n{error}".partition("\nassert ")[0]
    return [line[:LONGEST_TEXT] for line in words.splitlines() if line.strip()]


def where(stack: traceback.StackSummary, node: Any) -> dict[str, Any]:
    """Return the course's frames of a traceback, and what the test did up to its failing statement."""
    ours = next((i for i, frame in enumerate(stack) if is_ours(Path(frame.filename), node.config.rootpath)), 0)
    test, inner = of_test(stack, node), innermost(stack, node)
    told = [each for each in (test, inner) if each and each.demand]
    return {
        "frames": [(frame.filename, frame.lineno, frame.name, frame.line) for frame in stack[ours:]],
        "did": lines_to(test, MOST_LINES) if test else [],
        "subject": told[0].subject if told else "",
        "claim": told[0].claim if told else "",
        "called": test.called if test else ("", ""),
        "parameters": parameters(node),
    }


def of_test(stack: traceback.StackSummary, node: Any) -> Statement | None:
    """Return the test's own statement that failed, or called what failed."""
    mine = [frame for frame in stack if frame.filename == str(node.path)]
    named = [frame for frame in mine if frame.name == getattr(node, "originalname", "")]
    frame = (named or mine or [None])[-1]  # of a hypothesis test, the first frame of that name is a wrapper
    return statement_at(frame.filename, frame.lineno) if frame and frame.name != "<module>" else None


def innermost(stack: traceback.StackSummary, node: Any) -> Statement | None:
    """Return the innermost failing statement in the course's files."""
    mine = [frame for frame in stack if is_ours(Path(frame.filename), node.config.rootpath)]
    return statement_at(mine[-1].filename, mine[-1].lineno) if mine else None


def parameters(node: Any) -> str:
    """Return the values of a parametrized test, `x = 5, y = [1]`, as far as they are short."""
    values = getattr(getattr(node, "callspec", None), "params", {})
    texts = [f"{name} = {text}" for name, given in values.items() if len(text := name_or_value(given)) < 60]
    return ", ".join(texts)


def name_or_value(given: object) -> str:
    """Return a function's or class's name; of other values the repr."""
    return getattr(given, "__name__", None) or value(given)


def heart_of(error: BaseException) -> BaseException:
    """Return the underlying error: what broke a test file's import, or the first of hypothesis' exception group."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif type(error).__name__ == "CollectError" and error.__cause__:
            error = error.__cause__
        else:
            return error


def chain(error: BaseException | None) -> Iterator[BaseException]:
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
