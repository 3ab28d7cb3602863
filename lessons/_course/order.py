"""Course machinery. Decides what a check runs, and in which order: the student's next task first."""

from collections.abc import Collection
from dataclasses import dataclass

from lessons._course.catalog import Lesson, Task

REST = "*"  # every test that no group names


@dataclass(frozen=True)
class Plan:
    """What a check runs.

    focus: the task that the student is working on; None if every task is done.
    groups: tests, named as in lesson.toml, in the order in which they run. The check ends at the first failure.
    is_whole: whether all tests and the smoke script are among them.
    """

    focus: Task | None
    groups: tuple[tuple[str, ...], ...]
    is_whole: bool

    @property
    def tests(self) -> list[str]:
        """The tests that are named, in order."""
        return [test for group in self.groups for test in group if test != REST]


def plan_of(lesson: Lesson, done: Collection[int], blank: Collection[int]) -> Plan:
    """Return what to run, given the tasks that were `done` before and those whose body is not written.

    The first task that is written and not done comes first, then those that were done before, then the other written
    ones. The rest of the lesson follows only if every task is written. A check with nothing new to run has no groups:
    its focus is the first unwritten task.
    """
    written = [task for task in lesson.tasks if task.number not in blank]
    new = [task for task in written if task.number not in done]
    old = [task for task in written if task.number in done]
    if blank and not new:
        return Plan(next(task for task in lesson.tasks if task.number in blank), (), False)
    ordered = [*new[:1], *old, *new[1:]]
    groups = [task.tests for task in ordered] + ([] if blank else [(REST,)])
    return Plan(new[0] if new else None, tuple(groups), not blank)
