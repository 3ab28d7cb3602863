"""Course machinery. Finds the task that a failure belongs to; the clearest sign first."""

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from lessons._course.catalog import Bug, Lesson, Task
from lessons._course.headline import is_hang
from lessons._course.report import Report, TestResult
from lessons._course.starter import definitions
from lessons._course.student import StudentFile


@dataclass(frozen=True)
class Blame:
    """The task that a failure belongs to.

    is_likely: whether it is only the likeliest one.
    symbol: the function, if an experiment has found it.
    is_seen_elsewhere: whether the test is none of the task's own, which may all pass.
    """

    task: Task
    is_likely: bool = False
    symbol: str = ""
    is_seen_elsewhere: bool = False

    @property
    def words(self) -> str:
        """Return "Task 3 (Seats.give_back)" or "Most likely task 3 (Seats.give_back)"."""
        return f"{'Most likely task' if self.is_likely else 'Task'} {self.task.number} ({self.task.symbols})"


class Attribution:
    """Knows the lesson, the student's files and what the check was about."""

    def __init__(self, lesson: Lesson, files: list[StudentFile], report: Report) -> None:
        self.lesson, self.files, self.report = lesson, files, report

    def of_test(self, result: TestResult, bugs: Iterable[Bug]) -> Blame | None:
        """Return the task of a failed test: the one that an experiment found, or else the test's own.

        Of a test of no task: the one whose code raised, or likely a pitfall's. Of a test that took too long: the one
        in whose code a call did not end, and no other; the machine may be slow.
        """
        failure = result.failure
        if is_hang(result):
            task = self.of_frames([tuple(failure.place[:2])]) if failure and failure.place else None
            return Blame(task) if task else None
        own = self.lesson.task(result.task) if result.task else None
        if failure and failure.cause:
            task = self.lesson.task(failure.cause[0])
            return Blame(task, symbol=failure.cause[1], is_seen_elsewhere=task != own)
        if own:
            return Blame(own)
        if failure and (task := self.of_frames([(path, line) for path, line, *_ in failure.frames])):
            return Blame(task)
        return self.likely([task for bug in bugs if (task := self.of_bug(bug))])

    def of_frames(self, frames: Iterable[tuple[str, int]]) -> Task | None:
        """Return the task whose body holds the innermost of these (path, line)."""
        spans = [(str(file.path), *span) for file in self.files for span in self._spans(file)]
        for path, line in reversed(list(frames)):
            for mine, first, last, task in spans:
                if path == mine and first <= line <= last:
                    return task
        return None

    def of_bug(self, bug: Bug) -> Task | None:
        """Return the task in whose body a pitfall's change lies."""
        file = next((file for file in self.files if file.module == bug.module), None)
        if file:
            at = file.reference_source.find(bug.find)
            line = file.reference_source.count("\n", 0, at) + 1
            for name, node in definitions(ast.parse(file.reference_source)):
                task = self.lesson.tasks_in(file.module).get(name)
                if task and node.lineno <= line <= (node.end_lineno or node.lineno):
                    return task
        return None

    def likely(self, candidates: Iterable[Task] = ()) -> Blame | None:
        """Return the first candidate, or the task that the student is working on, or else the last one."""
        tasks = [*candidates, *([self.report.focus] if self.report.focus else []), *reversed(self.lesson.tasks)]
        return Blame(tasks[0], is_likely=True) if tasks else None

    def _spans(self, file: StudentFile) -> list[tuple[int, int, Task]]:
        try:
            nodes = list(definitions(ast.parse(file.source)))
        except (SyntaxError, ValueError):
            return []
        tasks = self.lesson.tasks_in(file.module)
        return [(node.lineno, node.end_lineno or node.lineno, tasks[name]) for name, node in nodes if name in tasks]
