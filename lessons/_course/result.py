"""Course machinery. The one result of a check, which the terminal, `--json` and the website show alike."""

import re
from dataclasses import asdict, dataclass
from typing import Any

from lessons._course.output import value
from lessons._course.report import Failure

STATUSES = ("passed", "core", "stop", "done", "not_written", "failing", "error", "hung", "not_checked", "course_error")
MOST_CALLS = 8


@dataclass(frozen=True)
class Result:
    """What a check found, about one task.

    status: one of STATUSES. passed: the whole lesson. core: its core. stop: all up to a stop, with the reference's
        bodies for the rest. done: this task, while others are open. failing: an assertion does not hold. error: the
        code raises, or Python stops. hung: it takes too long. not_checked: nothing could be run. course_error: the
        course's own tests are broken.
    task: its number; None if the result is about the whole lesson. is_likely: whether the task is only a guess.
    input: what the test did. expected, got: the sides of the comparison that failed. hint: one sentence.
    """

    status: str
    task: int | None = None
    is_likely: bool = False
    input: str = ""
    expected: str = ""
    got: str = ""
    hint: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def calls_of(failure: Failure) -> list[str]:
    """Return the calls of a hypothesis state machine up to its failure; empty for other tests.

    Invariants, which hypothesis lists after each call, are left out, and so are all but the last calls.
    """
    lines = failure.notes.splitlines()
    names = [re.match(r"(?:[\w, ]+ = )?state\.(\w+)\(", line) for line in lines]
    calls = [(name[1], line.strip()) for name, line in zip(names, lines, strict=True) if name]
    plain = [name for name, line in calls if line.startswith("state.") and line.endswith("()")]
    checked = {name for name in plain if plain.count(name) > 1 and len(calls) >= 3}
    kept = [value(line, 100) for name, line in calls if name not in checked and name != "teardown"]
    return kept if len(kept) <= MOST_CALLS else [f"… {len(kept) - MOST_CALLS} earlier calls", *kept[-MOST_CALLS:]]


def input_of(failure: Failure) -> list[str]:
    """Return what the test did: its calls, hypothesis' example, or its lines up to the failing one."""
    if calls := calls_of(failure):
        return calls
    example = example_of(failure.notes)
    values = [f"with {example or failure.parameters}"] if example or failure.parameters else []
    return [*values, *failure.did]


def example_of(notes: str) -> str:
    """Return the arguments of hypothesis' failing example: `n=5, xs=[]`."""
    found = re.search(r"Failing [a-z ]+: \w+\(\n(.*?)\n\)", notes, re.DOTALL)
    lines = found[1].splitlines() if found else []
    return value(" ".join(line.partition("  #")[0].strip() for line in lines).rstrip(","), 200)
