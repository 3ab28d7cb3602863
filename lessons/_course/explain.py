"""Course machinery. Turns the findings of a check into plain words: the one thing to do next."""

from lessons._course.advice import Advice
from lessons._course.attribution import Attribution, Blame
from lessons._course.catalog import Lesson, Task
from lessons._course.explain_green import explain_green
from lessons._course.explain_smoke import explain_smoke
from lessons._course.headline import cause, happened, is_hang
from lessons._course.messages import MOST_PITFALLS, counted, general_hints, likely_bugs, remarks
from lessons._course.output import both, shortened
from lessons._course.places import Places
from lessons._course.pointers import Pointers
from lessons._course.report import Report, TestResult
from lessons._course.result import Result, input_of
from lessons._course.student import Change, Problem, StudentFile

PRINTED = "Your code printed:"


class Explainer:
    """Words the findings of a check, given the lesson and the student's files."""

    def __init__(self, lesson: Lesson, places: Places, files: list[StudentFile]) -> None:
        self.lesson = lesson
        self.places = places
        self.files = files
        self.at = Pointers(lesson, places, files)

    def advise(self, report: Report, problems: list[Problem]) -> Advice:
        """Pick what to fix first: the source text, then the first failing test, then an open task, then the tokens."""
        if report.is_right:
            return explain_green(report, self.at)
        missing = [problem for problem in problems if problem.kind == "missing"]
        if missing:
            return self.problem(missing[0])
        if problems and any(is_call_error(result) for result in report.results):
            return self.problem(problems[0])
        if report.trouble:
            return self._trouble(report.trouble)
        if bad := self._first_bad(report):
            return self.test(bad, report)
        if problems:
            return self.problem(problems[0])
        unwritten = [entry.task for entry in report.tasks if entry.state == "not written"]
        if unwritten:
            return self._next(unwritten[0], report)
        if report.count("not run"):
            left = counted(report.count("not run"), "test")
            return Advice(f"Time ran out after {report.seconds:.0f} s, with {left} still to run.")
        return explain_smoke(report.smoke, Attribution(self.lesson, self.files, report), self.at)

    def problem(self, problem: Problem) -> Advice:
        """Describe something that is wrong in the source text itself."""
        task = next((x for x in self.lesson.tasks if problem.symbol in {t.symbol for t in x.targets}), None)
        headline = {
            "syntax": "Syntax error: nothing could be run.",
            "missing": f"{problem.symbol} is missing from your file.",
            "signature": f"The signature of {problem.symbol} has changed.",
        }[problem.kind]
        commands = [] if problem.kind == "syntax" else [self.at.command("diff")]
        result = Result("error", task.number if task else None, got=problem.text)
        where = self.at.shown(problem.path, problem.line)
        return Advice(headline, where, problem.text.splitlines(), commands, result=result)

    def change(self, change: Change) -> Advice:
        """Describe how the reference has changed since the student started."""
        lines = [f"{symbol} is now {text}" for symbol, text in change.symbols.items()]
        return Advice(
            "The reference has changed since you started.",
            self.places.shown(change.path),
            lines or ["The change is outside your tasks and affects no signature."],
            [self.at.command("start", "--fresh    # a new starter beside your own file")],
        )

    def printed(self, text: str) -> Advice:
        """Note that the student's code prints, where only the smoke script's result was expected."""
        return Advice("Your code prints while it runs. That does no harm here.", lines=shortened(text).splitlines())

    def unwritten(self, task: Task, done: list[int]) -> Advice:
        """Say that a task's body is not written yet."""
        advice = Advice(f"Task {task.number} is not written yet: {task.title}.", self.at.place(Blame(task)))
        advice.lines = [f"Write the body of {task.symbols} ({task.size}); the page says what it must do."]
        if not done:
            advice.lines.append("Red is expected here: the tests are waiting for your code.")
        advice.commands = [self.at.command("hint", task.number)]
        advice.result = Result("not_written", task.number, hint=advice.lines[0])
        return advice

    def test(self, bad: TestResult, report: Report) -> Advice:
        """Explain one failed test."""
        failure = bad.failure
        if failure and failure.task:
            return self._ran_into(failure.task, bad, report)
        bugs = likely_bugs(self.lesson, bad)
        where = Attribution(self.lesson, self.files, report)
        if "::" not in bad.test:
            return self._not_loaded(bad, where)
        blame = where.of_test(bad, bugs)
        advice = Advice(headline(bad, blame), failure=failure)
        advice.where = self.at.student_line(failure) or (self.at.place(blame) if blame else "")
        got, expected = both(failure.got, failure.expected) if failure else ("", "")
        advice.lines = self._facts(bad, got, expected)
        did = input_of(failure) if failure else []
        if did:
            advice.lines += ["What the test did:", *("  " + line for line in did)]
        hints = self._hints(bad, bugs)
        advice.lines += hints
        if blame and blame.is_seen_elsewhere:
            advice.lines.append(f"With the reference's {blame.symbol} in place of yours, this test passes.")
        elif blame and blame.task.number in report.done_before and not blame.is_likely:
            advice.lines.append(f"Task {blame.task.number} was done before: a later change broke it.")
        if failure and failure.stdout.strip():
            advice.lines += [PRINTED, *("  " + line for line in shortened(failure.stdout).splitlines())]
        advice.name_test(bad.test)
        advice.commands = self.at.after_red(blame)
        advice.result = self._result(bad, blame, did, got, expected, hints)
        return advice

    def not_yours(self, bad: Advice) -> Advice:
        """Say that the course itself is broken: the same test fails with the reference, too."""
        lines = ["The same test fails with the course's own solution in place of your file.", *bad.lines]
        result = Result("course_error", None, input=bad.result.input, got=bad.result.got or bad.headline)
        headline = "The course's own code is broken here, not yours: please report it."
        return Advice(headline, lines=lines, failure=bad.failure, result=result)

    def _next(self, task: Task, report: Report) -> Advice:
        """Name the task that is next; say first that the one before is done, if it has just been checked."""
        advice = self.unwritten(task, report.tasks_done)
        focus = report.focus
        if focus and focus.number in report.tasks_done:
            count = sum(len(entry.results) for entry in report.tasks if entry.task is focus)
            advice.lines = [f"Next: task {task.number}, {task.title[:1].lower()}{task.title[1:]}.", *advice.lines]
            advice.headline = f"Task {focus.number} is done: {counted(count, 'test')} passed."
            advice.result = Result("done", focus.number, hint=advice.lines[0])
        return advice

    def _ran_into(self, number: int, bad: TestResult, report: Report) -> Advice:
        """Describe a test that called a task that is not written."""
        advice = self.unwritten(self.lesson.task(number), report.tasks_done)
        advice.name_test(bad.test)
        advice.failure = bad.failure
        return advice

    def _not_loaded(self, bad: TestResult, attribution: Attribution) -> Advice:
        """Describe a test file that cannot be imported, usually because the student's file cannot."""
        failure = bad.failure
        where = self.at.student_line(failure)
        headline = "Your file cannot be imported." if where else f"{bad.test} cannot be loaded."
        if where and is_hang(bad):
            headline = f"Importing your file {happened(bad)}"
        lines = [*self._facts(bad, "", ""), *self._hints(bad, [])]
        if failure and failure.type != "TookTooLong":
            lines[:0] = [cause(failure)]
        if failure and failure.stdout.strip():
            lines += [PRINTED, *("  " + line for line in shortened(failure.stdout).splitlines())]
        frames = failure.frames if failure and not is_hang(bad) else []
        task = attribution.of_frames([(path, line) for path, line, *_ in frames])
        status, hint = "hung" if is_hang(bad) else "error", lines[-1] if lines else ""
        result = Result(status, task.number if task else None, got=cause(failure) if failure else "", hint=hint)
        advice = Advice(headline, where, lines, failure=failure, result=result)
        advice.name_test(bad.test)
        return advice

    def _trouble(self, trouble: str) -> Advice:
        first, *rest = trouble.splitlines()
        where = self.at.named_in(trouble)
        hint = (
            "Comment out what runs at the top of your file, outside its functions." if "top of a file" in first else ""
        )
        lines = [first, *([hint] if hint else []), *shortened("\n".join(rest), 1000).splitlines()]
        status = "hung" if "Time ran out" in first else "error"
        return Advice("The check could not run.", where, lines, result=Result(status, got=first))

    def _facts(self, bad: TestResult, got: str, expected: str) -> list[str]:
        """Return the two sides of the comparison, and what else the failure says."""
        if is_hang(bad):
            return [one_call(*bad.failure.place)] if bad.failure and bad.failure.place else []
        sides = [f"Your code: {got}", f"Expected:  {expected}"] if got or expected else []
        return sides + (remarks(bad.failure) if bad.failure else [])

    def _hints(self, bad: TestResult, bugs) -> list[str]:
        """Name the pitfalls that match what was observed; else what usually causes such an error."""
        if bugs:
            what = "this pitfall" if len(bugs) == 1 else "one of these pitfalls"
            names = " · ".join(bug.pitfall for bug in bugs[:MOST_PITFALLS])
            return [f"It looks like {what} of {self.places.shown(self.lesson.page)}: {names}"]
        if bad.failure is None:
            return []
        return general_hints(bad.failure)

    def _result(self, bad: TestResult, blame: Blame | None, did, got: str, expected: str, hints) -> Result:
        failure = bad.failure
        status = "failing"
        if is_hang(bad):
            status = "hung"
        elif failure and failure.type not in ("AssertionError", "Failed"):
            status, got = "error", cause(failure)
        task = blame.task.number if blame else None
        hint = hints[0] if hints else "What should make it stop?" if status == "hung" else ""
        return Result(status, task, bool(blame and blame.is_likely), "\n".join(did), expected, got, hint)

    def _first_bad(self, report: Report) -> TestResult | None:
        """Return the failure to explain: the first, but in a run of everything the first task's."""
        for entry in report.tasks:
            if not report.focus and entry.state == "failing":
                return next(result for result in entry.results if result.outcome in ("failed", "hung"))
            if not report.focus and entry.state == "not written":
                return None
        return report.first_bad


def headline(bad: TestResult, blame: Blame | None) -> str:
    return f"{blame.words} {happened(bad, blame.task.targets)}" if blame else f"A test {happened(bad)}"


def one_call(path: str, line: int, name: str) -> str:
    """Tell which call of the student's code did not end."""
    what = f"one call of {name}" if name.isidentifier() else f"line {line}"
    return f"At least half of that time passed in {what}: does it ever end?"


def is_call_error(result: TestResult) -> bool:
    return result.failure is not None and result.failure.type in ("TypeError", "AttributeError")
