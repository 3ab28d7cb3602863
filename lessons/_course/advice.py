"""Course machinery. The advice at the end of a check: one thing to do next."""

from dataclasses import dataclass, field
from typing import Any

from lessons._course.report import Failure
from lessons._course.result import Result


@dataclass
class Advice:
    """A headline, where to look, what it means and what to type next.

    result: the same for programs. test, failure: the failed test that it is about, if any.
    """

    headline: str
    where: str = ""
    lines: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    test: str = ""
    failure: Failure | None = None
    result: Result = field(default_factory=lambda: Result("not_checked"))

    @property
    def is_good(self) -> bool:
        return self.result.status in ("passed", "core", "stop", "done")

    def name_test(self, test: str) -> None:
        """End with the name of the test that failed."""
        self.test = test
        self.lines.append(f"Test: {test}")

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"headline": self.headline, "where": self.where, "lines": self.lines, "commands": self.commands}
