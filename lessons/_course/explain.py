"""Course machinery. Turns the findings of a check into plain words: the one thing to do next."""

import re
from dataclasses import dataclass, field
from typing import Any

from lessons._course.catalog import Lesson
from lessons._course.checker import CHOSEN
from lessons._course.messages import (
    MOST_LINES,
    MOST_PITFALLS,
    counted,
    general_hints,
    in_words,
    is_hang,
    likely_bugs,
    said,
)
from lessons._course.places import Places
from lessons._course.report import Failure, Report, SmokeReport, TaskReport, TestResult
from lessons._course.student import Change, Problem, StudentFile, line_of

TOO_LONG = "It did not finish within {seconds:g} seconds. Most likely a loop never ends: what should make it stop?"


@dataclass
class Advice:
    """A headline, where to look, what it means and what to type next. failure: the one it is about, if any."""

    headline: str
    where: str = ""
    lines: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    failure: Failure | None = None

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"headline": self.headline, "where": self.where, "lines": self.lines, "commands": self.commands}


class Explainer:
    """Words the findings of a check, given the lesson and the student's files."""

    def __init__(self, lesson: Lesson, places: Places, files: list[StudentFile], test_seconds: float) -> None:
        self.lesson = lesson
        self.places = places
        self.files = files
        self.test_seconds = test_seconds
        self.results: list[TestResult] = []

    def advise(self, report: Report, problems: list[Problem]) -> Advice:
        """Pick what to fix first: the source text, then the first open task, then a failing test, then the tokens."""
        self.results = report.results
        if report.passed:
            return self._green(report)
        missing = [problem for problem in problems if problem.kind == "missing"]
        if missing:
            return self.problem(missing[0])
        failing = [task for task in report.tasks if task.state in ("failing", "not written")]
        if problems and any(self._is_call_error(result) for result in report.results):
            return self.problem(problems[0])
        if report.trouble:
            return Advice("The check could not run.", self._named_in(report.trouble), report.trouble.splitlines())
        if failing:
            return self._task(failing[0], report)
        bad = next((result for result in report.results if result.outcome in ("failed", "hung")), None)
        if bad:
            return self._test(bad, f"The {self._first_words(bad)}", None) if "::" in bad.test else self._not_loaded(bad)
        if problems:
            return self.problem(problems[0])
        if report.count("not run"):
            left = counted(report.count("not run"), "test")
            return Advice(f"Time ran out after {report.seconds:.0f} s, with {left} still to run.")
        return self._smoke(report.smoke)

    def problem(self, problem: Problem) -> Advice:
        """Describe something that is wrong in the source text itself."""
        number = self.lesson.number
        where = self.places.shown(problem.path) + (f":{problem.line}" if problem.line else "")
        headline = {
            "syntax": "Syntax error: nothing could be run.",
            "missing": f"{problem.symbol} is missing from your file.",
            "signature": f"The signature of {problem.symbol} has changed.",
        }[problem.kind]
        commands = [] if problem.kind == "syntax" else [f"python -m lessons diff {number}"]
        return Advice(headline, where, problem.text.splitlines(), commands)

    def change(self, change: Change) -> Advice:
        """Describe how the reference has changed since the student started."""
        lines = [f"{symbol} is now {text}" for symbol, text in change.symbols.items()]
        return Advice(
            "The reference has changed since you started.",
            self.places.shown(change.path),
            lines or ["The change is outside your tasks and affects no signature."],
            [f"python -m lessons start {self.lesson.number} --fresh    # a new starter beside your own file"],
        )

    def _green(self, report: Report) -> Advice:
        count = report.count("passed")
        if report.smoke.text == CHOSEN:
            done = ", ".join(str(number) for number in report.tasks_done)
            whole = f"python -m lessons check {self.lesson.number}    # the whole lesson"
            return Advice(f"Task {done} is done: {counted(count, 'test')} passed.", commands=[whole])
        return Advice(
            f"Lesson {self.lesson.number} passes: {counted(count, 'test')}"
            + (f", and {report.smoke.text}." if report.smoke.state == "equal" else "."),
            commands=[f"python -m lessons diff {self.lesson.number}    # compare your file with the reference"],
        )

    def _task(self, report: TaskReport, whole: Report) -> Advice:
        task = report.task
        hint = f"python -m lessons hint {self.lesson.number} {task.number}"
        if report.state == "not written":
            advice = Advice(f"Task {task.number} is not written yet: {task.title}.", self._place(report), [], [hint])
            advice.lines = [f"Write the body of {task.symbols} ({task.size}); the page says what it must do."]
            if not whole.tasks_done:
                advice.lines.append("Red is expected here: the tests are waiting for your code.")
            return advice
        bad = next(result for result in report.results if result.outcome in ("failed", "hung"))
        if "::" not in bad.test:
            return self._not_loaded(bad)
        advice = self._test(bad, f"Task {task.number} ({task.symbols}): {self._first_words(bad)}", report)
        advice.commands.append(hint)
        return advice

    def _not_loaded(self, result: TestResult) -> Advice:
        """Describe a test file that cannot be imported, usually because the student's file cannot."""
        advice = self._test(result, f"{result.test} cannot be loaded.", None)
        if advice.where:
            advice.headline = "Your file cannot be imported."
        return advice

    def _place(self, report: TaskReport) -> str:
        target = report.task.targets[0]
        file = next(file for file in self.files if file.module == target.file)
        line = line_of(file, target.symbol)
        return self.places.shown(file.path) + (f":{line}" if line else "")

    def _first_words(self, result: TestResult) -> str:
        name = in_words(result.test)
        return f"test “{name}” does not finish." if is_hang(result) else f"test “{name}” fails."

    def _test(self, result: TestResult, headline: str, report: TaskReport | None) -> Advice:
        failure = result.failure
        advice = Advice(headline, failure=failure)
        if is_hang(result):
            advice.lines.append(TOO_LONG.format(seconds=self.test_seconds if failure else result.seconds or 0))
            if not failure:
                advice.lines[-1] = "It was still running when the time limit for the whole check was reached."
        elif failure:
            advice.lines += said(failure)
        if failure:
            advice.where = self._student_line(failure) or (self._place(report) if report else "")
            advice.lines += self._pitfalls(result)
            advice.lines += general_hints(failure)
            if failure.stdout.strip():
                advice.lines += ["Your code printed:", *failure.stdout.strip().splitlines()[-MOST_LINES:]]
        advice.lines.append(f"Test: {result.test}")
        return advice

    def _student_line(self, failure: Failure) -> str:
        """Return the innermost line of the student's code in the failure's traceback."""
        mine = {str(file.path): file for file in self.files}
        if failure.syntax and failure.syntax[0] in mine:
            return f"{self.places.shown(failure.syntax[0])}:{failure.syntax[1]}"
        for path, line, name, text in reversed(failure.frames):
            if path in mine:
                return f"{self.places.shown(path)}:{line} in {name}" + (f":  {text}" if text else "")
        return ""

    def _named_in(self, text: str) -> str:
        """Return the last line of the student's code that a traceback names."""
        for file in self.files:
            found = re.findall(rf"{re.escape(file.path.name)}\"?(?::|, line )(\d+)", text)
            if found:
                return f"{self.places.shown(file.path)}:{found[-1]}"
        return ""

    def _pitfalls(self, result: TestResult) -> list[str]:
        """Name the pitfalls that this test points to, then those of other tests unless the error explains itself."""
        bugs = likely_bugs(self.lesson, [result])
        if result.failure is None or not general_hints(result.failure):
            bugs = [*dict.fromkeys([*bugs, *likely_bugs(self.lesson, self.results)])]
        if not bugs:
            return []
        what = "this pitfall" if len(bugs) == 1 else "one of these pitfalls"
        names = " · ".join(bug.pitfall for bug in bugs[:MOST_PITFALLS])
        return [f"It looks like {what} of {self.places.shown(self.lesson.page)}: {names}"]

    def _is_call_error(self, result: TestResult) -> bool:
        return result.failure is not None and result.failure.type in ("TypeError", "AttributeError")

    def _smoke(self, smoke: SmokeReport) -> Advice:
        if smoke.state != "differs" or not smoke.divergence:
            return Advice(
                "The tests pass, but the smoke script fails.", lines=smoke.output.splitlines() or [smoke.text]
            )
        found = smoke.divergence
        lines = [
            f"First difference at new token {found['position']}: Hugging Face chose {found['expected']}, "
            f"your code {found['got']}; the two highest logits there are {found['gap']:.4f} apart.",
            str(found["where"]),
        ]
        return Advice("The tests pass, but your tokens differ from Hugging Face's.", lines=lines)
