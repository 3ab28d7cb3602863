"""Course machinery. Decides what a check runs, and in which order: the student's next task first."""

from collections.abc import Collection
from dataclasses import dataclass

from lessons._course.catalog import Lesson, Task

REST = None  # the tests of no task


@dataclass(frozen=True)
class Plan:
    """What a check runs.

    focus: the task that the student is working on; None if every task is done.
    tasks: the tasks whose tests run, in this order; REST among them if the whole lesson runs, with its smoke script.
    filled: the tasks whose bodies are the reference's: at a stop those that come after it, or all but the core's.
    ends_early: whether the check ends at the first failure.
    """

    focus: Task | None
    tasks: tuple[int | None, ...]
    filled: frozenset[int] = frozenset()
    ends_early: bool = True

    @property
    def is_whole(self) -> bool:
        return REST in self.tasks


def plan_of(lesson: Lesson, done: Collection[int], blank: Collection[int], core: bool = False) -> Plan:
    """Return what to run, given the tasks that were `done` before and those whose body is not written.

    The first task that is written and not done comes first, then those that were done before, then the other written
    ones. The rest of the lesson follows only if every task is written, or at a stop, with the reference's bodies in
    place of the others. A check with nothing new to run runs nothing: its focus is the first unwritten task.

    Args:
        core: whether only the core's tasks count; those beyond are the reference's even if they are written.
    """
    filled = frozenset(task.number for task in lesson.tasks if task.is_more) if core else frozenset()
    if not core and is_stop(lesson, blank):
        filled = frozenset(blank)
    blank = set(blank) - filled
    written = [task for task in lesson.tasks if task.number not in filled | blank]
    new = [task for task in written if task.number not in done]
    old = [task for task in written if task.number in done]
    if blank and not new:
        return Plan(next(task for task in lesson.tasks if task.number in blank), ())
    numbers = [task.number for task in [*new[:1], *old, *new[1:]]]
    return Plan(new[0] if new else None, (*numbers, *([] if blank else [REST])), filled)


def whole_core(lesson: Lesson) -> Plan:
    """Return a plan that runs everything of the core, whatever fails."""
    core = sorted(lesson.core)
    return Plan(None, (*core, REST), frozenset(task.number for task in lesson.tasks) - lesson.core, ends_early=False)


def is_stop(lesson: Lesson, blank: Collection[int]) -> bool:
    """Whether what is not written are the tasks after a stop, or only tasks beyond the core."""
    missing = lesson.core & set(blank)
    return any(missing == {n for n in lesson.core if n > sitting.last_task} for sitting in lesson.sittings)
