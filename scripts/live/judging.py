"""Course machinery. `python -m lessons check N --task M` in a page: the same judge, with pytest in the same process."""

import contextlib
import io
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from scripts import ROOT
from scripts.live.small_loop import small_loops

from lessons._course.catalog import Lesson, read_lesson
from lessons._course.event_log import Watcher
from lessons._course.places import CHILD, Places
from lessons._course.progress import Progress
from lessons._course.runner import Command
from lessons._course.student import StudentFile, starter_of, student_files
from lessons._course.verdict import Verdict, judge

LESSONS = tuple(f"lessons.{path.parent.name}" for path in ROOT.glob("lessons/*/lesson.toml"))
OURS = ("mini_engine", "tests", *LESSONS)  # imported afresh for each check
NEEDS_A_THREAD = "KV_COURSE_LAST_SECONDS"
UNWRITTEN = re.compile(r"^( +)raise NotImplementedError\(.*\)$", re.MULTILINE)
OPTIONS = ("--capture=sys", "-p", "no:faulthandler", "-p", "no:threadexception")


class InPage:
    """A `Launch` that runs pytest in this process, to its end, when it is created."""

    def __init__(self, command: Command) -> None:
        from scripts.live.unavailable import Unavailable

        import pytest

        said = io.StringIO()
        with environment(command), small_loops(), redirect_stdout(said), redirect_stderr(said):
            self.code = int(pytest.main([*command.arguments[2:], *OPTIONS], [Unavailable(command.cwd / "work")]))
        command.stdout.write_text(said.getvalue()[-20_000:], encoding="utf-8")
        command.stderr.touch()

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        """Do nothing: the run has ended."""


@contextlib.contextmanager
def environment(command: Command, ours: tuple[str, ...] = OURS) -> Iterator[None]:
    """Set up the environment of a separate process: variables, the path, the overlay, no module of `ours` imported."""
    before, path, finders, modules = dict(os.environ), list(sys.path), list(sys.meta_path), dict(sys.modules)
    folder, limit = Path.cwd(), sys.getrecursionlimit()
    forget(ours)
    os.environ |= {name: value for name, value in command.env.items() if name != NEEDS_A_THREAD}
    os.chdir(command.cwd)
    sys.path[:0] = [str(CHILD)]
    try:
        import course_overlay

        course_overlay.install()
        yield
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ |= before
        sys.setrecursionlimit(limit)
        sys.path[:], sys.meta_path[:] = path, finders
        forget((*ours, "course_reporter"))
        sys.modules |= {name: module for name, module in modules.items() if is_in(name, ours)}


def is_in(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def forget(packages: tuple[str, ...]) -> None:
    """Drop these packages' modules, so that the next import is a fresh one."""
    for name in [name for name in sys.modules if is_in(name, packages)]:
        del sys.modules[name]


def write_files(lesson: Lesson, task: int, source: str, places: Places) -> list[StudentFile]:
    """Write `source` as the file of the task, and the reference as the lesson's other files."""
    shutil.rmtree(places.work, ignore_errors=True)
    target = lesson.task(task).targets[0].file
    files = student_files(lesson, places)
    every = [each.number for each in lesson.tasks]
    for file in files:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        text = source if file.module == target else starter_of(lesson, file, every)
        file.path.write_text(text, encoding="utf-8", newline="\n")
    return files


def verdict(
    root: Path, lesson_id: str, task: int, source: str, seconds: float = 10.0, watcher: Watcher = lambda event: None
) -> Verdict:
    """Judge one task as a terminal does. seconds: of processor time, per test. watcher: called with each event."""
    places = Places(root, root / "work")
    lesson = read_lesson(root / "lessons" / lesson_id / "lesson.toml")
    write_files(lesson, task, source, places)
    progress = Progress(places.work)
    return judge(lesson, places, progress, task=task, launch=InPage, test_seconds=seconds, watcher=watcher)


def as_data(found: Verdict) -> dict[str, Any]:
    """Return the page's data: the advice, the tests in order, the failed one and those not run, the result."""
    tests = [{"name": result.test, "outcome": result.outcome} for result in found.report.results]
    notes = [note.as_dict() for note in found.notes]
    more = {"test": found.advice.test, "tests_run": tests, "notes": notes, "not_checked": found.report.skipped}
    return found.as_dict() | more


def starter(root: Path, lesson_id: str, task: int) -> dict[str, str]:
    """Return the task's file with only this task's bodies unwritten, and where `work/` keeps it."""
    places = Places(root, root / "work")
    lesson = read_lesson(root / "lessons" / lesson_id / "lesson.toml")
    target = lesson.task(task).targets[0].file
    file = next(file for file in student_files(lesson, places) if file.module == target)
    others = [each.number for each in lesson.tasks if each.number != task]
    return {"path": places.shown(file.path), "source": starter_of(lesson, file, others)}


def with_line(root: Path, lesson_id: str, task: int, line: str) -> str:
    """Return the task's file with `line` as its function's whole body, and the other tasks' bodies complete."""
    source = starter(root, lesson_id, task)["source"]
    assert len(UNWRITTEN.findall(source)) == 1, "the task has one body"
    return UNWRITTEN.sub(lambda found: found[1] + " ".join(line.split()), source)
