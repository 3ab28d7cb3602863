"""Course machinery. Shared by the proofs about the lessons: the work is done ahead, two checks at a time."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock

import pytest

from lessons._course.catalog import Lesson, read_lessons
from lessons._course.places import Places
from lessons._course.student import StudentFile, starter_of, student_files
from lessons._course.warm import warm_launch

PLACES = Places.find()
LESSONS = read_lessons(PLACES)
AT_ONCE = 2
PATIENCE = 900.0  # seconds for a check: a busy machine proves nothing about a lesson


class Proofs:
    """Runs ahead of time, a few at a time, what the selected tests will need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pool = ThreadPoolExecutor(AT_ONCE)
        os.environ.setdefault("PYTHONHASHSEED", "0")  # a wrong answer may use Python's own hashes
        self.launch = warm_launch()
        self.futures: dict[str, Future] = {}

    def expect(self, item: pytest.Item) -> None:
        """Start the work of one test, given the test's parameters."""
        work: Callable | None = getattr(item.function, "work", None)
        if work:
            folder = self.folder / f"{len(self.futures)}"
            run = partial(work, **item.callspec.params, folder=folder, launch=self.launch)
            self.futures[item.name] = self.pool.submit(run)


def ahead(work: Callable) -> Callable:
    """Make a test's `found` the result of `work` for its parameters."""

    def mark(test: Callable) -> Callable:
        test.work = work
        return test

    return mark


def one_at_a_time(function: Callable) -> Callable:
    """Return the function guarded by a lock: Python 3.11 counts the depth of all trees being parsed in one number."""
    lock = Lock()

    def locked(*args, **kwargs):
        with lock:
            return function(*args, **kwargs)

    return locked


def written(lesson: Lesson, folder: Path, keep: list[int]) -> list[StudentFile]:
    """Write starters, with the tasks in `keep` written as in the reference."""
    files = student_files(lesson, Places(PLACES.root, folder))
    for file in files:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        file.path.write_text(starter_of(lesson, file, keep), encoding="utf-8")
    return files
