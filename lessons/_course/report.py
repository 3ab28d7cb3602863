"""Course machinery. What a check finds: of each test, each task, the smoke script, and all together."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from lessons._course.catalog import Lesson, Task


@dataclass
class Failure:
    """What a test said when it failed. `task`: the unwritten task it ran into, if it did."""

    type: str
    message: str
    notes: str = ""
    task: int | None = None
    frames: list[list] = field(default_factory=list)
    syntax: list | None = None
    stdout: str = ""

    @property
    def text(self) -> str:
        """The exception as Python words it, with its notes."""
        return f"{self.type}: {self.message}\n{self.notes}"


@dataclass
class TestResult:
    """outcome: passed, failed, skipped; hung and not run where the time was up."""

    test: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0
    failure: Failure | None = None

    __test__ = False


@dataclass
class TaskReport:
    """state: done, failing, not written, NOT CHECKED."""

    task: Task
    state: str
    results: list[TestResult]


@dataclass
class SmokeReport:
    """state: equal, differs, failed, NOT CHECKED. `text` says why.

    divergence: the first difference, as the script's `--json` gives it. output: the end of what it printed.
    """

    state: str
    text: str = ""
    divergence: dict[str, Any] | None = None
    output: str = ""


@dataclass
class Report:
    """All that a check found. `trouble`: what kept the tests from being run as they should."""

    lesson: Lesson
    results: list[TestResult] = field(default_factory=list)
    tasks: list[TaskReport] = field(default_factory=list)
    smoke: SmokeReport = field(default_factory=lambda: SmokeReport("NOT CHECKED", "it was not run"))
    trouble: str = ""
    seconds: float = 0.0

    def count(self, *outcomes: str) -> int:
        return sum(result.outcome in outcomes for result in self.results)

    @property
    def passed(self) -> bool:
        """Every test that could run passed, no task is open, and the tokens are equal where they could be compared."""
        return (
            not self.trouble
            and self.count("passed") > 0
            and self.count("failed", "hung", "not run") == 0
            and all(report.state in ("done", "NOT CHECKED") for report in self.tasks)
            and self.smoke.state in ("equal", "NOT CHECKED")
        )

    @property
    def tasks_done(self) -> list[int]:
        return [report.task.number for report in self.tasks if report.state == "done"]

    @property
    def skipped(self) -> list[str]:
        """The tests that were skipped, by reason."""
        reasons = Counter(result.reason for result in self.results if result.outcome == "skipped")
        return [f"{count} test{'s' if count > 1 else ''}: {reason}" for reason, count in reasons.items()]

    @property
    def not_checked(self) -> list[str]:
        """Everything that was not looked at, and why."""
        return self.skipped + ([f"tokens: {self.smoke.text}"] if self.smoke.state == "NOT CHECKED" else [])


def smoke_verdict(found: dict[str, Any]) -> SmokeReport:
    if found["match"]:
        tokens = sum(len(request["ours"]) for request in found["requests"])
        return SmokeReport("equal", f"{tokens} of {tokens} tokens equal Hugging Face's")
    worst = next((request for request in found["requests"] if not request["match"]), None)
    if worst is None:
        return SmokeReport("failed", "; ".join(found["faults"]))
    return SmokeReport("differs", "the tokens are not Hugging Face's", worst["first_divergence"])
