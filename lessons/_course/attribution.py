"""Course machinery. Finds the task that a failure belongs to; the clearest sign first."""

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lessons._course.catalog import Bug, Lesson, Task
from lessons._course.report import Failure, Report, TestResult
from lessons._course.result import calls_of
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

        Of a test of no task: the one whose code raised, a pitfall's, or the one that it names.
        """
        failure = result.failure
        own = self.lesson.task(result.task) if result.task else None
        if failure and failure.cause:
            task = self.lesson.task(failure.cause[0])
            return Blame(task, symbol=failure.cause[1], is_seen_elsewhere=task != own)
        if own:
            return Blame(own)
        if failure and (task := self.of_frames([(path, line) for path, line, *_ in failure.frames])):
            return Blame(task)
        tasks = [task for bug in bugs if (task := self.of_bug(bug))]
        return self.likely([*tasks, *self._named(failure, result)])

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

    def _named(self, failure: Failure | None, result: TestResult) -> list[Task]:
        """Return the tasks whose symbol the failing lines call, innermost first, then those that the test calls."""
        if failure is None:
            return []
        texts = [text or "" for _, _, _, text in reversed(failure.frames)]
        if calls := calls_of(failure):
            texts += [body_of(self._source_of(result), rule) for rule in map(name_of_call, reversed(calls))]
        return [task for text in [*texts, *reversed(failure.did)] for task in self._called_in(text)]

    def _called_in(self, text: str) -> list[Task]:
        """Return the tasks whose symbol is called in `text`, the last call first."""
        names = {target.symbol.rpartition(".")[2]: task for task in self.lesson.tasks for target in task.targets}
        found = {name: text.rfind(f"{name}(") for name in names if re.search(rf"\b{name}\(", text)}
        return [names[name] for name in sorted(found, key=lambda name: -found[name])]

    def _source_of(self, result: TestResult) -> str:
        # a test's id is relative to the root, above the modules' `mini_engine`
        roots = [Path(str(file.reference).removesuffix(file.module)) for file in self.files]
        path = next(iter(roots), Path()) / result.test.partition("::")[0]
        return path.read_text(encoding="utf-8") if path.is_file() else ""


def name_of_call(call: str) -> str:
    found = re.search(r"state\.(\w+)\(", call)
    return found[1] if found else ""


def body_of(source: str, name: str, depth: int = 2) -> str:
    """Return the source of the function `name`, followed by that of the functions of this file that it calls."""
    if not name or not depth:
        return ""
    try:
        nodes = [node for _, node in definitions(ast.parse(source)) if node.name == name]
    except SyntaxError:
        return ""
    text = "\n".join(ast.get_source_segment(source, node) or "" for node in nodes)
    called = dict.fromkeys(re.findall(r"\.(\w+)\(", text))
    return "\n".join([text, *(body_of(source, inner, depth - 1) for inner in called if inner != name)])
