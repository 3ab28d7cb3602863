"""Course machinery. Shared by the proofs about the lessons: the work is done ahead, two checks at a time."""

import os
import re
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
TRANSCRIPTS = PLACES.root / "tests/course/transcripts"
AT_ONCE = 2
PATIENCE = 900.0  # seconds for a check: a busy machine proves nothing about a lesson


class Proofs:
    """Runs ahead of time, a few at a time, what the selected tests will need, and keeps what they record."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pool = ThreadPoolExecutor(AT_ONCE)
        os.environ.setdefault("PYTHONHASHSEED", "0")  # what a wrong answer prints may contain Python's own hashes
        self.launch = warm_launch()
        self.futures: dict[str, Future] = {}
        self.transcripts: dict[str, dict[str, str]] = {}

    def expect(self, item: pytest.Item) -> None:
        """Start the work of one test, given the test's parameters."""
        work: Callable | None = getattr(item.function, "work", None)
        if work:
            folder = self.folder / f"{len(self.futures)}"
            run = partial(work, **item.callspec.params, folder=folder, launch=self.launch)
            self.futures[item.name] = self.pool.submit(run)

    def keep(self) -> None:
        """Write the recorded sections into the lessons' transcripts, beside those that were not run."""
        for name, sections in self.transcripts.items():
            path = TRANSCRIPTS / f"{name}.txt"
            path.parent.mkdir(exist_ok=True)
            path.write_text(joined(sections_of(path) | sections), encoding="utf-8", newline="\n")


class Transcript:
    """What `check` says about each answer: status, task and headline in `lN.txt`, a few whole examples in `whole.txt`.

    It is compared, or recorded with `--record`. The whole examples, one for each kind of verdict, are those that the
    file names.
    """

    def __init__(self, proofs: Proofs, lesson: Lesson, *, record: bool) -> None:
        self.proofs, self.name, self.record = proofs, f"l{lesson.number}", record

    def holds(self, title: str, line: str, whole: str) -> None:
        """Compare what is said about the answer called `title`; with --record, write it down."""
        self._section(self.name, title, line)
        if f"{self.name}, {title}" in sections_of(TRANSCRIPTS / "whole.txt"):
            self._section("whole", f"{self.name}, {title}", whole)

    def _section(self, name: str, title: str, text: str) -> None:
        text = "\n".join(line.rstrip() for line in text.strip().splitlines())
        if self.record:
            self.proofs.transcripts.setdefault(name, {})[title] = text
            return
        golden = sections_of(TRANSCRIPTS / f"{name}.txt").get(title)
        assert golden is not None, f"{name}.txt does not have {title!r}; record it with --record and read it"
        assert text == golden, f"`check` says something else about {title!r}; if it reads well, run again with --record"


def sections_of(path: Path) -> dict[str, str]:
    """Return a transcript's sections by title."""
    if not path.exists():
        return {}
    parts = re.split(r"^=== (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {title: text.strip() for title, text in zip(parts[1::2], parts[2::2], strict=True)}


def joined(sections: dict[str, str]) -> str:
    """Return the text of a transcript, its sections sorted by title."""
    gap = "\n" if any("\n" in text for text in sections.values()) else ""
    return gap.join(f"=== {title}\n{text}\n" for title, text in sorted(sections.items()))


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
