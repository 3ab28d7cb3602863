"""Course machinery. Compares the student's file with the reference, side by side or unified."""

import ast
import difflib
from collections.abc import Collection, Iterator
from typing import NamedTuple

from lessons._course.catalog import Lesson
from lessons._course.starter import find_function
from lessons._course.student import StudentFile, starter_of

CONTEXT = 3


class Row(NamedTuple):
    """A line of the side-by-side view. kind: equal, changed, or gap (equal lines left out)."""

    kind: str
    mine: str
    reference: str


def shown_reference(lesson: Lesson, file: StudentFile, open_tasks: Collection[int]) -> str:
    """Return the reference; the bodies of tasks that are not in `open_tasks` are removed as in the starter."""
    return starter_of(lesson, file, keep=open_tasks)


def unified(file: StudentFile, reference: str, name: str) -> list[str]:
    """Return the lines of a unified diff from the student's file to the reference; none if they are equal."""
    mine, theirs = file.source.splitlines(), reference.splitlines()
    return list(difflib.unified_diff(mine, theirs, f"{name} (yours)", f"{file.module} (reference)", lineterm=""))


def side_by_side(file: StudentFile, reference: str) -> list[Row]:
    """Return rows of both texts, with a few equal lines around each difference."""
    mine, theirs = file.source.splitlines(), reference.splitlines()
    matcher = difflib.SequenceMatcher(None, mine, theirs, autojunk=False)
    rows = []
    for group in matcher.get_grouped_opcodes(CONTEXT):
        _, i, _, j, _ = group[0]
        rows.append(Row("gap", f"line {i + 1}", f"line {j + 1}"))
        for tag, i1, i2, j1, j2 in group:
            rows += _rows("equal" if tag == "equal" else "changed", mine[i1:i2], theirs[j1:j2])
    return rows


def sameness(lesson: Lesson, file: StudentFile, open_tasks: Collection[int]) -> str:
    """Say what it means that the student's file equals `shown_reference`."""
    hidden = {task.number for task in lesson.tasks_in(file.module).values()} - set(open_tasks)
    if not hidden:
        return "no difference."
    if open_tasks:
        return "no difference outside the tasks that are not done."
    return "this is the unchanged starter; none of its tasks is written yet."


def solutions(lesson: Lesson, file: StudentFile, task: int | None) -> Iterator[tuple[str, str]]:
    """Yield (title, source) of each task of this module, or only of `task`."""
    source = file.reference_source
    tree, lines = ast.parse(source), source.splitlines()
    for symbol, of_task in lesson.tasks_in(file.module).items():
        if task in (None, of_task.number):
            node = find_function(tree, symbol)
            yield f"Task {of_task.number}: {symbol}", "\n".join(lines[node.lineno - 1 : node.end_lineno])


def _rows(kind: str, mine: list[str], theirs: list[str]) -> list[Row]:
    height = max(len(mine), len(theirs))
    padded = (side + [""] * (height - len(side)) for side in (mine, theirs))
    return [Row(kind, *pair) for pair in zip(*padded, strict=True)]
