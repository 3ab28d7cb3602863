"""Course machinery. The findings of a check: per test, per task, for the smoke script, and in total."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from lessons._course.catalog import Lesson, Task


@dataclass
class Failure:
    """How a test failed.

    task: the number of the unwritten task that it ran into, if any.
    words: the lines that the test itself says about it.
    did: the test's lines up to the failing statement, whose lines begin with `>`.
    parameters: the values of a parametrized test.
    got, expected, difference: what the code gave, what the test expects, and where the two first differ.
    must_raise: the exceptions of which one was to be raised, "ValueError or KeyError".
    subject, claim: the expression that was compared and the whole assertion, as source.
    called: the function, and its arguments, whose call was to raise.
    place: (file, line, function) of the call that did not end, of a test that took too long.
    cause: the number and symbol of the task with whose reference in place of the student's code the test passes.
    """

    type: str
    message: str
    words: list[str] = field(default_factory=list)
    notes: str = ""
    task: int | None = None
    frames: list[list] = field(default_factory=list)
    syntax: list | None = None
    stdout: str = ""
    did: list[str] = field(default_factory=list)
    parameters: str = ""
    got: str = ""
    expected: str = ""
    difference: str = ""
    must_raise: str = ""
    subject: str = ""
    claim: str = ""
    called: tuple[str, str] = ("", "")
    place: list | None = None
    cause: tuple[int, str] | None = None

    @property
    def is_assertion(self) -> bool:
        """Whether the test found something wrong, rather than something raising."""
        return self.type in ("AssertionError", "Failed")

    @property
    def own_notes(self) -> list[str]:
        """The notes that the test itself added; hypothesis' come after them."""
        return list(takewhile(lambda line: not line.startswith("Failing "), self.notes.splitlines()))

    @property
    def text(self) -> str:
        """The exception as Python prints it, with its notes."""
        return f"{self.type}: {self.message}\n{self.notes}"


@dataclass
class TestResult:
    """One test's result. outcome: passed, failed, skipped, hung, or not run (time ran out).

    task: the number of the task that the test is marked with, if any.
    """

    test: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0
    failure: Failure | None = None
    task: int | None = None

    __test__ = False


@dataclass
class TaskReport:
    """One task's result. state: done, failing, not written, NOT CHECKED, or left out, with the reference's body."""

    task: Task
    state: str
    results: list[TestResult]


@dataclass
class SmokeReport:
    """The smoke script's result. state: equal, differs, failed, hung or NOT CHECKED; `text` says why.

    divergence: the first difference, as in the script's `--json`. output: the end of what a failed script printed.
    printed: what the student's code printed beside the result.
    """

    state: str
    text: str = ""
    divergence: dict[str, Any] | None = None
    output: str = ""
    printed: str = ""


@dataclass
class Report:
    """All findings of a check.

    trouble: what kept the tests from running properly; empty if nothing did.
    focus: the task that the student is working on, if the check was ordered by it.
    is_whole: whether all tests were to run, and not only those of some tasks.
    done_before: the tasks that were done before this check.
    filled: the tasks whose bodies were the reference's.
    """

    lesson: Lesson
    results: list[TestResult] = field(default_factory=list)
    tasks: list[TaskReport] = field(default_factory=list)
    smoke: SmokeReport = field(default_factory=lambda: SmokeReport("NOT CHECKED", "it was not run"))
    trouble: str = ""
    seconds: float = 0.0
    focus: Task | None = None
    is_whole: bool = True
    done_before: list[int] = field(default_factory=list)
    filled: frozenset[int] = frozenset()

    def count(self, *outcomes: str) -> int:
        return sum(result.outcome in outcomes for result in self.results)

    @property
    def passed(self) -> bool:
        """Whether all of it is right, and nothing of it was the reference's."""
        return self.is_right and not self.filled

    @property
    def core_passed(self) -> bool:
        """Whether the whole lesson is right with no more of the reference's than what is beyond the core."""
        return self.is_right and self.is_whole and not self.filled & self.lesson.core

    @property
    def is_right(self) -> bool:
        """Whether all tests that could run passed, no task is open, and the tokens, if compared, are equal."""
        return (
            not self.trouble
            and self.count("passed") > 0
            and self.count("failed", "hung", "not run") == 0
            and all(report.state in ("done", "NOT CHECKED", "left out") for report in self.tasks)
            and self.smoke.state in ("equal", "NOT CHECKED")
        )

    @property
    def first_bad(self) -> TestResult | None:
        """The first test that failed or hung, in the order in which they ran."""
        return next((result for result in self.results if result.outcome in ("failed", "hung")), None)

    @property
    def tasks_done(self) -> list[int]:
        return [report.task.number for report in self.tasks if report.state == "done"]

    @property
    def skipped(self) -> list[str]:
        """The skipped tests, by reason."""
        reasons = Counter(result.reason for result in self.results if result.outcome == "skipped")
        return [f"{count} test{'s' if count > 1 else ''}: {reason}" for reason, count in reasons.items()]

    @property
    def not_checked(self) -> list[str]:
        """Everything that was not checked, and why."""
        return self.skipped + ([f"tokens: {self.smoke.text}"] if self.smoke.state == "NOT CHECKED" else [])


def smoke_verdict(found: dict[str, Any], printed: str = "") -> SmokeReport:
    """Return what a smoke script's JSON object says. printed: everything else in its output.

    A check runs the script as the lesson does, which exercises everything; what is not exercised is a failure here.
    """
    if found["match"] and found.get("not_exercised"):
        return SmokeReport("failed", "; ".join(found["not_exercised"]), printed=printed)
    if found["match"]:
        tokens = sum(len(request["ours"]) for request in found["requests"])
        return SmokeReport("equal", f"all {tokens} tokens equal Hugging Face's", printed=printed)
    worst = next((request for request in found["requests"] if not request["match"]), None)
    if worst is None:
        return SmokeReport("failed", "; ".join(found["faults"]), printed=printed)
    differs = "your tokens differ from Hugging Face's"
    return SmokeReport("differs", differs, worst["first_divergence"], printed=printed)
