"""Course machinery. A whole check: inspect the source, run the tests, explain the result, save the progress."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from lessons._course.advice import Advice
from lessons._course.catalog import Lesson
from lessons._course.checker import Check
from lessons._course.event_log import Watcher
from lessons._course.explain import Explainer
from lessons._course.limits import TOTAL_SECONDS
from lessons._course.order import Plan, plan_of, whole_core
from lessons._course.places import COMMAND, CourseError, Places
from lessons._course.progress import Entry, Progress, today
from lessons._course.proof import CORE, WHOLE, Proof, digests
from lessons._course.report import Report, TaskReport
from lessons._course.runner import Launch, Spawned
from lessons._course.student import Problem, StudentFile, problems, reference_change, student_files, unwritten

START = f"{COMMAND} start"


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
            "core_passed": report.core_passed,
            "tasks": [{"number": x.task.number, "title": x.task.title, "state": x.state} for x in report.tasks],
            "tests": tests | {"total": len(report.results)},
            "smoke": asdict(report.smoke),
            "not_checked": report.not_checked,
            "result": self.advice.result.as_dict(),
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
    everything: bool = False,
    core: bool = False,
    seconds: float = TOTAL_SECONDS,
    test_seconds: float | None = None,
    launch: Launch = Spawned,
    watcher: Watcher = lambda event: None,
    blocked: Mapping[str, str] = MappingProxyType({}),
) -> Verdict:
    """Check the student's files for `lesson`: the next task first, up to the first failure.

    Args:
        task: check only this task.
        everything: run all tests, whatever fails.
        core: check the core's tasks only; the others' bodies are the reference's.

    Raises:
        CourseError: the student has not started, or the task does not exist.
    """
    files, entry = student_files(lesson, places), progress.entry(lesson)
    plan = Plan(lesson.task(task), (task,)) if task is not None else None
    need_files(files, lesson, places)
    explainer = Explainer(lesson, places, files)
    found = [problem for file in files for problem in problems(lesson, file, entry)]
    notes = [explainer.change(change) for file in files if (change := reference_change(lesson, file, entry))]
    broken = next((problem for problem in found if problem.kind == "syntax"), None)
    if broken:
        return Verdict(not_run(lesson), explainer.problem(broken), notes)
    blank, sources = unwritten(lesson, files), digests(files)
    plan = plan or planned(lesson, entry, blank, everything, core)
    if plan and (task in blank or not plan.tasks):
        open_task = lesson.task(task) if task is not None else plan.focus
        assert open_task is not None, "a plan without tasks has a focus"
        report = settled(not_run(lesson), entry, blank, task)
        keep(progress, lesson, entry, report, task)
        return Verdict(report, explainer.unwritten(open_task, report.tasks_done), notes)
    limits: dict[str, Any] = {"seconds": seconds, "test_seconds": test_seconds, "launch": launch, "blocked": blocked}
    report = settled(Check(lesson, places, watcher=watcher, plan=plan, files=files, **limits).run(), entry, blank, task)
    if not report.trouble:
        is_same = digests(files) == sources  # and was not saved during the check
        keep(progress, lesson, entry, report, task, Proof.of(report, places, sources) if is_same else None)
    advice = explainer.advise(report, found)
    if is_doubtful(advice, files) and fails_with_the_reference(advice, lesson, places, limits):
        advice = explainer.not_yours(advice)
    return Verdict(report, advice, [*notes, *_left_over(explainer, report, found)])


def planned(lesson: Lesson, entry: Entry, blank: set[int], everything: bool, core: bool) -> Plan | None:
    """Return what a check of no task in particular runs; None for all tests, whatever fails."""
    if everything:
        return whole_core(lesson) if core else None
    return plan_of(lesson, entry.tasks_done, blank, core)


def settled(report: Report, entry: Entry, blank: set[int], task: int | None) -> Report:
    """Complete the report by what is known without running: unwritten tasks, and earlier checks of the others."""
    report.done_before = [number for number in entry.tasks_done if number not in blank]
    for found in report.tasks:
        if found.task.number in blank - report.filled:
            found.state = "not written"
        elif found.state == "NOT CHECKED" and {r.outcome for r in found.results} <= {"not run"}:
            found.state = "done" if found.task.number in report.done_before and report.focus else found.state
    if task is not None:
        report.tasks = [found for found in report.tasks if found.task.number == task]
    return report


def is_doubtful(advice: Advice, files: Sequence[StudentFile]) -> bool:
    """Whether a failure may be the course's own, or the machine's.

    An error in which no line of the student's takes part, or a test that takes too long though no call of the
    student's does.
    """
    failure, mine = advice.failure, {str(file.path) for file in files}
    if failure is None or failure.task or advice.result.status not in ("error", "hung") or failure.syntax:
        return False
    if advice.result.status == "hung":
        return advice.result.task is None and "::" in advice.test
    return failure.type != "Crash" and not any(path in mine for path, *_ in failure.frames)


def fails_with_the_reference(advice: Advice, lesson: Lesson, places: Places, limits: dict[str, Any]) -> bool:
    """Whether the failed test fails with the reference in place of the student's files, too."""
    again = Check(lesson, places, only=[advice.test], files=[], **limits).run()
    return bool(again.trouble) or again.first_bad is not None


def need_files(files: Sequence[StudentFile], lesson: Lesson, places: Places) -> None:
    """Raise CourseError if the student has not started."""
    for file in files:
        if not file.path.exists():
            raise CourseError(f"{places.shown(file.path)} does not exist; create it with: {START} {lesson.number}")
        if not file.path.is_file():
            raise CourseError(
                f"{places.shown(file.path)} is not a file; move it away and type: {START} {lesson.number}"
            )


def not_run(lesson: Lesson) -> Report:
    """Return the report of a check that ended before any test."""
    return Report(lesson, tasks=[TaskReport(task, "NOT CHECKED", []) for task in lesson.tasks])


def keep(
    progress: Progress, lesson: Lesson, entry: Entry, report: Report, task: int | None, proof: Proof | None = None
) -> None:
    """Save what this check found: a task is done if its tests ran and passed, now or in an earlier check."""
    if task is not None:
        entry.tasks_done = sorted(set(entry.tasks_done) - {task} | set(report.tasks_done))
    else:
        entry.tasks_done = sorted({*report.tasks_done, *report.filled.intersection(report.done_before)})
    if report.is_whole and task is None and not (report.count("not run") or report.filled) and report.results:
        entry.tests_passed, entry.tests_total = report.count("passed"), len(report.results)
    if task is None:
        date_passes(entry, report)
        keep_proof(entry, report, proof)
    entry.started = entry.started or today()
    progress.save(lesson, entry)


def date_passes(entry: Entry, report: Report) -> None:
    """Date what has passed, the core or all of it, and withdraw what no longer does."""
    if report.passed:
        entry.passed, entry.not_checked = today(), report.not_checked
    elif not (report.core_passed and report.filled <= set(report.done_before)):  # those were not looked at
        entry.passed, entry.not_checked = "", []
    if report.core_passed:
        entry.core_passed = today()
    elif not report.lesson.core <= set(entry.tasks_done):
        entry.core_passed = ""
    entry.first_passed = entry.first_passed or entry.passed


def keep_proof(entry: Entry, report: Report, proof: Proof | None) -> None:
    """Keep what this check proved, and drop what no longer passes."""
    new = {WHOLE if report.passed else CORE: asdict(proof)} if proof else {}
    dates = {WHOLE: entry.passed, CORE: entry.core_passed}
    entry.proofs = {part: kept for part, kept in (entry.proofs | new).items() if dates.get(part)}


def _left_over(explainer: Explainer, report: Report, found: list[Problem]) -> list[Advice]:
    """Return what is odd about files whose tests pass anyway, as notes."""
    if not report.is_right:
        return []
    printed = [explainer.printed(report.smoke.printed)] if report.smoke.printed else []
    return [*(explainer.problem(problem) for problem in found), *printed]
