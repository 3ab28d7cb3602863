"""Course machinery. Finds the files in which a task's tests are marked: `@pytest.mark.task(3)`."""

import re
from collections.abc import Iterator
from pathlib import Path

from lessons._course.catalog import Lesson
from lessons._course.places import CourseError

MARK = re.compile(r"\bmark\.task\((\d+)\)")


def files_of_tasks(lesson: Lesson, root: Path) -> dict[int, list[str]]:
    """Return each task's test files, as pytest names them, by the task's number. Nothing is imported.

    Raises:
        CourseError: a mark's number is no task's, or a task has no test.
    """
    files: dict[int, list[str]] = {task.number: [] for task in lesson.tasks}
    for path in test_files(lesson, root):
        name = path.relative_to(root).as_posix()
        for number in sorted({int(found) for found in MARK.findall(path.read_text(encoding="utf-8"))}):
            if number not in files:
                raise CourseError(f"{name} marks a test of task {number}, and lesson {lesson.number} has no such task.")
            files[number].append(name)
    for number, names in files.items():
        if not names:
            mark = f"@pytest.mark.task({number})"
            raise CourseError(f"Task {number} of lesson {lesson.number} has no test; mark its tests with {mark}.")
    return files


def test_files(lesson: Lesson, root: Path) -> Iterator[Path]:
    for path in (root / name for name in lesson.tests):
        yield from sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
