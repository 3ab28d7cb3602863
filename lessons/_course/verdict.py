"""Course machinery. A whole check: inspect the source, run the tests, explain the result, save the progress."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from lessons._course.catalog import Lesson
from lessons._course.checker import TEST_SECONDS, TOTAL_SECONDS, Check, Watcher
from lessons._course.explain import Advice, Explainer
from lessons._course.places import CourseError, Places
from lessons._course.progress import Entry, Progress, today
from lessons._course.report import Report, TaskReport
from lessons._course.runner import Launch, Spawned
from lessons._course.student import Problem, StudentFile, problems, reference_change, student_files


@dataclass
class Verdict:
    """The findings of a check, the one thing to do next, and notes."""

    report: Report
    advice: Advice
    notes: list[Advice] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.report.passed

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        report = self.report
        tests = {word: report.count(word) for word in ("passed", "failed", "hung", "not run", "skipped")}
        return {
            "lesson": report.lesson.number,
            "id": report.lesson.id,
            "passed": report.passed,
            "tasks": [{"number": x.task.number, "title": x.task.title, "state": x.state} for x in report.tasks],
            "tests": tests | {"total": len(report.results)},
            "smoke": asdict(report.smoke),
            "not_checked": report.not_checked,
            "advice": self.advice.as_dict(),
            "notes": [note.as_dict() for note in self.notes],
            "seconds": round(report.seconds, 2),
        }


def judge(
    lesson: Lesson,
    places: Places,
    progress: Progress,
    *,
    task: int | None = None,
    seconds: float = TOTAL_SECONDS,
    test_seconds: float = TEST_SECONDS,
    launch: Launch = Spawned,
    watcher: Watcher = lambda event: None,
    blocked: Mapping[str, str] = MappingProxyType({}),
) -> Verdict:
    """Check the student's files for `lesson`, or only one task.

    Raises:
        CourseError: the student has not started, or the task does not exist.
    """
    only = lesson.task(task).tests if task is not None else ()
    files, entry = student_files(lesson, places), progress.entry(lesson)
    need_files(files, lesson, places)
    explainer = Explainer(lesson, places, files, test_seconds)
    found = [problem for file in files for problem in problems(lesson, file, entry)]
    changes = [change for file in files if (change := reference_change(lesson, file, entry))]
    notes = [explainer.change(change) for change in changes]
    broken = next((problem for problem in found if problem.kind == "syntax"), None)
    if broken:
        return Verdict(not_run(lesson), explainer.problem(broken), notes)
    limits = {"seconds": seconds, "test_seconds": test_seconds}
    check = Check(lesson, places, launch=launch, watcher=watcher, only=only, files=files, blocked=blocked, **limits)
    report = check.run()
    if task is not None:
        report.tasks = [entry for entry in report.tasks if entry.task.number == task]
    if not report.trouble:
        keep(progress, lesson, entry, report, task)
    return Verdict(report, explainer.advise(report, found), [*notes, *_left_over(explainer, report, found)])


def need_files(files: Sequence[StudentFile], lesson: Lesson, places: Places) -> None:
    """Raise CourseError if the student has not started."""
    for file in files:
        if not file.path.exists():
            raise CourseError(
                f"{places.shown(file.path)} does not exist; create it with: python -m lessons start {lesson.number}"
            )


def not_run(lesson: Lesson) -> Report:
    """Return the report of a check that ended before any test."""
    return Report(lesson, tasks=[TaskReport(task, "NOT CHECKED", []) for task in lesson.tasks])


def keep(progress: Progress, lesson: Lesson, entry: Entry, report: Report, task: int | None) -> None:
    """Save what this check found. A check of one task updates only that task."""
    if task is not None:
        others = set(entry.tasks_done) - {task}
        entry.tasks_done = sorted(others | ({task} & set(report.tasks_done)))
    else:
        entry.tasks_done = report.tasks_done
        entry.tests_passed, entry.tests_total = report.count("passed"), len(report.results)
        entry.not_checked = report.not_checked if report.passed else []
        entry.passed = today() if report.passed else ""
        entry.first_passed = entry.first_passed or entry.passed
    entry.started = entry.started or today()
    progress.save(lesson, entry)


def _left_over(explainer: Explainer, report: Report, found: list[Problem]) -> list[Advice]:
    """Return problems of files whose tests pass anyway, as notes."""
    return [explainer.problem(problem) for problem in found] if report.passed else []
