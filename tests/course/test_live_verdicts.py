"""Course machinery. A task is judged in a page as in a terminal: the starter, the reference, right and wrong answers.

Protects readers from a task that is green only because a page has no tensors, and from one that no answer turns green.
The page's Python runs in Node here (scripts/live/in_node.py); test_live.py asks Chromium for one task of each lesson.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.live.in_node import PagePython, ends, is_there
from scripts.live.judging import write_files
from scripts.website.live_links import exercises

import pytest

from lessons._course.answers import apply, read_answers
from lessons._course.catalog import Lesson
from lessons._course.places import Places
from lessons._course.progress import Progress
from lessons._course.student import student_files
from lessons._course.verdict import judge
from lessons._course.warm import warm_launch
from tests.course.proofs import LESSONS, PATIENCE, PLACES

GROUPS = {lesson.id: exercises(lesson.page.read_text(encoding="utf-8")) for lesson in LESSONS}
NEEDS_ANOTHER_PROCESS = {("l12_tiers", "Python's own hash")}  # the page says that it leaves that test out
needs_node = pytest.mark.skipif(not is_there(), reason="needs Node, and Pyodide: python -m scripts.website.live")
each_task = pytest.mark.parametrize(
    ("lesson", "task"),
    [
        pytest.param(lesson, task, id=f"{lesson.id}-{task}")
        for lesson in LESSONS
        for group in GROUPS[lesson.id]
        for task in group
    ],
)


@pytest.fixture(scope="module")
def page_python() -> Iterator[PagePython]:
    python = PagePython()
    yield python
    python.close()


def in_a_terminal(lesson: Lesson, task: int, source: str, folder: Path) -> tuple[str, int | None, str]:
    """Return what the same file's check finds: status, task, and the test that failed."""
    places = Places(PLACES.root, folder / "work")
    write_files(lesson, task, source, places)
    found = judge(lesson, places, Progress(places.work), task=task, launch=warm_launch(), seconds=PATIENCE)
    return found.advice.result.status, found.advice.result.task, found.advice.test


def in_the_page(found: dict[str, Any]) -> tuple[str, int | None, str]:
    return found["result"]["status"], found["result"]["task"], found["test"]


def known(lesson: Lesson, task: int) -> Iterator[tuple[str, str, str]]:
    """Yield the known texts of a task's module: what each is, its source, and the status that it must have."""
    module = lesson.task(task).targets[0].file
    yield from ends(lesson, next(group for group in GROUPS[lesson.id] if task in group), task)
    sources = {file.module: file.reference_source for file in student_files(lesson, PLACES)}
    answers = read_answers(lesson)
    for answer in answers.right:
        if answer.task == task:
            yield answer.name, apply(lesson, [answer], sources)[module], "done"
    for answer in answers.wrong:
        if answer.task == task:
            passes = (lesson.id, answer.name) in NEEDS_ANOTHER_PROCESS
            yield answer.name, apply(lesson, [answer], sources)[module], "done" if passes else "red"


@needs_node
@pytest.mark.nightly
@each_task
def test_a_page_s_verdict_is_the_terminal_s(lesson, task, page_python, tmp_path):
    wrong = []
    for name, source, status in known(lesson, task):
        found = page_python.check(lesson, task, source)
        mine = in_the_page(found)
        if (status == "red") != (mine[0] in ("failing", "error", "hung")) or status not in ("red", mine[0]):
            wrong.append(f"{name}: {mine}, and it must be {status}: {found['advice']}")
        elif (lesson.id, name) in NEEDS_ANOTHER_PROCESS:
            assert found["not_checked"], "the page must say what it leaves out"
        elif (theirs := in_a_terminal(lesson, task, source, tmp_path)) != mine:
            wrong.append(f"{name}: the page says {mine}, the terminal {theirs}")
        if name == "the reference":
            assert found["tests"]["passed"] > found["tests"]["skipped"], "most of its tests must run in the page"
    assert not wrong, "\n".join(wrong)


def test_most_tasks_can_be_written_in_the_page():
    written = sum(len(group) for groups in GROUPS.values() for group in groups)
    assert written >= 60, f"{written} tasks have an editor in their lesson's page; 60 must have one"
