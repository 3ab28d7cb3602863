"""Course machinery. Points: an equal number for each finished task; for equal tokens half as many as for all tasks.

Two thirds of a lesson's points are its tasks', in equal parts; one third is for the smoke script's tokens, which are
compared only once every task is written. Points are whole numbers. Anything that could not be checked earns nothing and
says why. Hints, solutions and the progress file do not count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lessons._course.catalog import Lesson

TASK_POINTS = 10
STATES = {"not written": "not written", "failing": "failing", "NOT CHECKED": "not checked", "hung": "does not end"}


@dataclass(frozen=True)
class Item:
    """Something that earns points: a task, or a lesson's tokens (number 0)."""

    number: int
    title: str
    state: str
    points: int
    most: int

    @property
    def name(self) -> str:
        return f"task {self.number}: {self.title}" if self.number else self.title


@dataclass(frozen=True)
class Graded:
    """A lesson's points. finding: the check's first finding, in a sentence or two. seconds: its duration."""

    lesson: int
    title: str
    items: tuple[Item, ...]
    finding: str
    seconds: float

    @property
    def points(self) -> int:
        return sum(item.points for item in self.items)

    @property
    def most(self) -> int:
        return sum(item.most for item in self.items)

    def as_dict(self) -> dict[str, Any]:
        return {"lesson": self.lesson, "title": self.title, "points": self.points, "most": self.most} | {
            "items": [asdict(item) for item in self.items],
            "finding": self.finding,
            "seconds": self.seconds,
        }


def graded(lesson: Lesson, verdict: Mapping[str, Any]) -> Graded:
    """Turn the output of `check N --all --json`, perhaps with `--core`, into points for the tasks of `lesson`."""
    is_right = verdict["passed"] or verdict["result"]["status"] == "core"
    states = {found["number"]: found["state"] for found in verdict["tasks"]}
    tokens = verdict["smoke"]["state"]
    return Graded(
        lesson.number,
        lesson.title,
        items_of(lesson, states, tokens),
        "" if is_right else finding_of(verdict["advice"]),
        float(verdict["seconds"]),
    )


def nothing(lesson: Lesson, why: str, state: str = "NOT CHECKED") -> Graded:
    """Return no points for a lesson that could not be checked at all, with the reason."""
    states = {task.number: state for task in lesson.tasks}
    return Graded(lesson.number, lesson.title, items_of(lesson, states, state), why, 0.0)


def items_of(lesson: Lesson, states: Mapping[int, str], tokens: str) -> tuple[Item, ...]:
    """Return an item for each task and, if the lesson has a smoke script, one for its tokens."""
    items = []
    for task in lesson.tasks:
        state = states.get(task.number, "NOT CHECKED")
        points = TASK_POINTS if state == "done" else 0
        items.append(Item(task.number, task.title, STATES.get(state, state), points, TASK_POINTS))
    if lesson.smoke:
        most = TASK_POINTS * len(lesson.tasks) // 2
        points = most if tokens == "equal" else 0
        items.append(Item(0, "tokens equal Hugging Face's", STATES.get(tokens, tokens), points, most))
    return tuple(items)


def finding_of(advice: Mapping[str, Any]) -> str:
    """Return the headline and the lines that explain it, without commands and paths of the grading machine."""
    lines: Sequence[str] = [line for line in advice["lines"] if not line.startswith(("Test:", "python -m"))]
    return "\n".join([advice["headline"], *lines])
