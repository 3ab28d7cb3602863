"""Course machinery. Words what passed: a lesson, its core, all up to a stop, or one task."""

from lessons._course.advice import Advice
from lessons._course.catalog import Lesson, Task
from lessons._course.checker import CHOSEN
from lessons._course.messages import counted
from lessons._course.output import listed
from lessons._course.pointers import Pointers
from lessons._course.report import Report
from lessons._course.result import Result


def explain_green(report: Report, at: Pointers) -> Advice:
    if not report.is_whole or report.smoke.text == CHOSEN:
        return task_done(report, at)
    if report.core_passed and report.filled:
        return core_passes(report)
    if report.filled:
        return stop_reached(report, at)
    return Advice(
        f"Lesson {report.lesson.number} passes: {found(report)}",
        lines=[f"NOT CHECKED: {line}" for line in report.not_checked],
        commands=[at.command("diff", "   # compare your file with the reference")],
        result=Result("passed"),
    )


def task_done(report: Report, at: Pointers) -> Advice:
    done = ", ".join(str(number) for number in report.tasks_done)
    task = report.tasks_done[-1] if report.tasks_done else None
    headline = f"Task {done} is done: {counted(report.count('passed'), 'test')} passed."
    return Advice(headline, commands=[at.command("check", "   # the whole lesson")], result=Result("done", task))


def core_passes(report: Report) -> Advice:
    left = left_out(report)
    lines = [f"{numbered(left)} beyond the core; {borrowed(left)}."]
    lines += [f"NOT CHECKED: {line}" for line in report.not_checked]
    return Advice(
        f"The core of lesson {report.lesson.number} passes: {found(report)}", lines=lines, result=Result("core")
    )


def stop_reached(report: Report, at: Pointers) -> Advice:
    lesson, left = report.lesson, left_out(report)
    index = stop_before(lesson, left[0])
    sitting, then = lesson.sittings[index : index + 2]
    return Advice(
        f"Lesson {lesson.number}, stop {index + 1} of {len(lesson.sittings)}: {sitting.title}.",
        lines=[
            found(report),
            f"{numbered(left)} not written yet; {borrowed(left)}.",
            f"A good place to end a sitting. The next one takes some {then.minutes} minutes and begins with",
            f"task {left[0].number}: {left[0].title}.",
        ],
        commands=[at.command("hint", left[0].number)],
        result=Result("stop"),
    )


def stop_before(lesson: Lesson, task: Task) -> int:
    """Return the index of the last sitting that ends before `task`."""
    return max(i for i, sitting in enumerate(lesson.sittings) if sitting.last_task < task.number)


def left_out(report: Report) -> list[Task]:
    return [task for task in report.lesson.tasks if task.number in report.filled]


def found(report: Report) -> str:
    """Return "24 tests, and all 213 tokens equal Hugging Face's."."""
    tokens = f", and {report.smoke.text}" if report.smoke.state == "equal" else ""
    return f"{counted(report.count('passed'), 'test')}{tokens}."


def numbered(tasks: list[Task]) -> str:
    """Return "Task 4 is", or "Tasks 4, 5 and 6 are"."""
    numbers = listed(task.number for task in tasks)
    return f"Tasks {numbers} are" if len(tasks) > 1 else f"Task {numbers} is"


def borrowed(tasks: list[Task]) -> str:
    return f"the reference's {'bodies took their' if len(tasks) > 1 else 'body took its'} place"
