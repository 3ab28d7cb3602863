"""Course machinery. Proofs for every lesson, derived from its lesson.toml alone.

A scripted student starts, checks, writes one task after another as in the reference, and ends with green, while
everything of later lessons cannot be imported. Each task, written alone, makes its own tests pass. Each pitfall's bug
is caught and shows its symptom. Two proofs run at a time, in processes forked from a warm one.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from lessons._course.advice import Advice
from lessons._course.catalog import Bug, Lesson, Task
from lessons._course.checker import Check
from lessons._course.explain import Explainer
from lessons._course.messages import shows
from lessons._course.order import Plan
from lessons._course.places import Places
from lessons._course.progress import Progress
from lessons._course.report import Report
from lessons._course.student import StudentFile, put_aside, start, student_files
from lessons._course.task_tests import MARK, files_of_tasks
from lessons._course.verdict import Verdict, judge
from tests.course.proofs import LESSONS, PATIENCE, PLACES, ahead, written

NUMBER = re.compile(r"Lesson (\d+)\.")

each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.id)
each_task = pytest.mark.parametrize(
    ("lesson", "task"),
    [
        pytest.param(
            *(lesson, task),
            id=f"{lesson.id}-{task.number}",
            marks=() if task.number in lesson.core else pytest.mark.nightly,  # what is beyond the core
        )
        for lesson in LESSONS
        for task in lesson.tasks
    ],
)
each_bug = pytest.mark.parametrize(
    ("lesson", "bug"),
    [pytest.param(lesson, bug, id=f"{lesson.id}-{bug.pitfall}") for lesson in LESSONS for bug in lesson.bugs],
)

STOPS = {
    f"{lesson.id}-{stop.last_task}": (lesson, range(1, stop.last_task + 1))
    for lesson in LESSONS
    for stop in lesson.sittings[:-1]
}
CORES = {
    f"{lesson.id}-core": (lesson, sorted(lesson.core)) for lesson in LESSONS if len(lesson.core) < len(lesson.tasks)
}
each_part = pytest.mark.parametrize(
    ("lesson", "tasks"), [pytest.param(*part, id=name) for name, part in (STOPS | CORES).items()]
)


def run_part(lesson: Lesson, tasks: list[int], *, folder, launch) -> Verdict:
    written(lesson, folder, tasks)
    options = {"launch": launch, "seconds": PATIENCE, "test_seconds": PATIENCE, "blocked": of_later_lessons(lesson)}
    return judge(lesson, Places(PLACES.root, folder), Progress(folder), **options)


def run_task(lesson: Lesson, task: Task, *, folder, launch) -> Report:
    files = written(lesson, folder, [task.number])
    plan = Plan(task, (task.number,))
    return Check(lesson, PLACES, files=files, launch=launch, plan=plan, seconds=PATIENCE).run()


def run_bug(lesson: Lesson, bug: Bug, *, folder, launch) -> tuple[Report, Advice]:
    """Run the bug's own tests on the reference with the bug in it; return the report and the advice."""
    files = written(lesson, folder, [task.number for task in lesson.tasks])
    buggy = next((file for file in files if file.module == bug.module), None)
    if buggy is None:  # in a module that is not the student's
        buggy = StudentFile(bug.module, PLACES.root / bug.module, folder / "buggy.py")
        files.append(buggy)
    buggy.path.write_text(buggy.reference_source.replace(bug.find, bug.replace), encoding="utf-8")
    report = Check(lesson, PLACES, files=files, launch=launch, only=bug.tests, seconds=PATIENCE).run()
    return report, Explainer(lesson, PLACES, files).advise(report, [])


def of_later_lessons(lesson: Lesson) -> dict[str, str]:
    """Return the modules and the scripts of later lessons, found by the first words of their docstrings."""
    return {
        module: f"it is lesson {number}'s, and lesson {lesson.number} must do without it"
        for module, number in lesson_of_modules().items()
        if number > lesson.number
    }


@cache
def lesson_of_modules() -> dict[str, int]:
    """Map each module of a lesson to the lesson's number."""
    found = {}
    paths = (path for folder in ("mini_engine", "lessons", "scripts") for path in (PLACES.root / folder).rglob("*.py"))
    for path in paths:
        if number := NUMBER.match(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""):
            parts = path.relative_to(PLACES.root).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = int(number[1])
    return found


def failures(report: Report) -> str:
    lines = [
        f"{result.test}: {result.outcome} {result.failure.text if result.failure else result.reason}"
        for result in report.results
        if result.outcome not in ("passed", "skipped")
    ]
    return "\n".join([report.trouble, *lines, report.smoke.text, report.smoke.output])


class Diary:
    """What a student sees who starts, writes one task after another, and finishes."""

    def __init__(self, lesson: Lesson, *, folder: Path, launch) -> None:
        self.lesson, self.places, self.launch = lesson, Places(PLACES.root, folder), launch
        self.blocked = of_later_lessons(lesson)
        self.numbers = [task.number for task in lesson.tasks]
        self.first = self.check([])
        self.steps = [self.check(self.numbers[:count]) for count in range(1, len(self.numbers))]
        self.last = self.check(self.numbers)
        self.same = all(file.source == file.reference_source for file in student_files(lesson, self.places))
        self.kept = put_aside(lesson, self.places)
        self.again = start(lesson, self.places, Progress(folder).entry(lesson))

    def check(self, tasks: list[int]) -> tuple[Verdict, list[int]]:
        """Write `tasks` and check: the whole lesson first and last, in between only the task just written."""
        written(self.lesson, self.places.work, tasks)
        options = {"launch": self.launch, "blocked": self.blocked, "seconds": PATIENCE, "test_seconds": PATIENCE}
        task = None if tasks in ([], self.numbers) else tasks[-1]
        progress = Progress(self.places.work)
        verdict = judge(self.lesson, self.places, progress, task=task, everything=not tasks, **options)
        return verdict, Progress(self.places.work).entry(self.lesson).tasks_done


@pytest.mark.nightly
@each_lesson
@ahead(Diary)
def test_a_student_gets_from_red_to_green(lesson, found):
    starter_is_red(lesson, found.first)
    assert [done for _, done in found.steps] == [found.numbers[:count] for count in range(1, len(found.numbers))]
    verdict, done = found.last
    assert verdict.passed and done == found.numbers, failures(verdict.report)
    assert verdict.report.smoke.state == "equal", failures(verdict.report)
    assert found.same, "with every task written, the student's file must equal the reference"
    assert len(found.kept) == len(lesson.modules) == len(found.again), "a reset must keep the old files and start over"


@pytest.mark.nightly
@each_part
@ahead(run_part)
def test_a_check_is_green_at_each_stop_and_with_the_core_alone(lesson, tasks, found):
    assert found.advice.result.status == ("core" if lesson.core <= set(tasks) else "stop"), failures(found.report)
    assert found.report.smoke.state == "equal", failures(found.report)
    assert found.report.filled == {task.number for task in lesson.tasks} - set(tasks)


def starter_is_red(lesson: Lesson, first: tuple[Verdict, list[int]]) -> None:
    """Check that each task's tests fail with its own message or another task's, and with nothing else."""
    verdict, done = first
    assert not verdict.passed and done == []
    assert verdict.advice.headline == f"Task 1 is not written yet: {lesson.tasks[0].title}."
    assert any("Red is expected" in line for line in verdict.advice.lines)
    assert [report.state for report in verdict.report.tasks] == ["not written"] * len(lesson.tasks)
    for report in verdict.report.tasks:
        failed = [result for result in report.results if result.outcome in ("failed", "hung")]
        met = [result.failure.task if result.failure else None for result in failed]
        assert report.task.number in met, f"no test of task {report.task.number} reaches it in the fresh starter"
        assert None not in met, (
            f"{failed[met.index(None)].test} is task {report.task.number}'s, and fails on the starter with something "
            f"else than a task's message: {failed[met.index(None)].failure}"
        )


@each_lesson
def test_the_lesson_names_nothing_of_a_later_one(lesson):
    """Neither its tests nor its smoke script import anything of later lessons, anywhere in the file."""
    later = of_later_lessons(lesson)
    smoke = PLACES.root / f"scripts/l{lesson.number}_smoke.py"
    tests = [*(PLACES.root / f"tests/l{lesson.number}").rglob("*.py"), smoke]
    for path in tests:
        text = path.read_text(encoding="utf-8")
        assert not imported(text) & set(later), f"{path.name} imports {imported(text) & set(later)}"
        for other in LESSONS:
            if other.number > lesson.number:
                assert not re.search(rf"l{other.number}_smoke|tests[/.]l{other.number}\b", text), path.name
    assert all(number < lesson.number for number in lesson.needs)


def imported(text: str) -> set[str]:
    """Return the modules that a source imports anywhere; for `from a import b` both a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@each_lesson
def test_every_mark_is_a_task_s_and_every_task_has_a_test(lesson):
    marked = {name for names in files_of_tasks(lesson, PLACES.root).values() for name in names}
    for path in (PLACES.root / f"tests/l{lesson.number}").rglob("*.py"):
        if MARK.search(path.read_text(encoding="utf-8")):
            assert PLACES.shown(path) in marked, f"{path.name} is not among the lesson's tests"


@each_task
@ahead(run_task)
def test_each_task_alone_makes_its_tests_pass(lesson, task, found):
    assert found.results and not found.count("failed", "hung", "not run"), failures(found)


def test_the_code_that_a_pitfall_changes_is_in_its_module_once():
    bugs = [
        (lesson.id, bug, (PLACES.root / bug.module).read_text(encoding="utf-8"))
        for lesson in LESSONS
        for bug in lesson.bugs
    ]
    stale = [f"{where}: {bug.pitfall}" for where, bug, source in bugs if source.count(bug.find) != 1]
    assert not stale, "code has changed: quote it anew in lesson.toml"


@pytest.mark.nightly
@each_bug
@ahead(run_bug)
def test_each_pitfall_is_caught_and_told(lesson, bug, found):
    reference = (PLACES.root / bug.module).read_text(encoding="utf-8")
    assert reference.count(bug.find) == 1, f"{bug.find!r} occurs {reference.count(bug.find)} times in {bug.module}"
    report, advice = found
    if report.count("skipped") == len(report.results) > 0:
        pytest.skip(f"NOT CHECKED: {report.skipped}")
    failed = [result for result in report.results if result.outcome in ("failed", "hung")]
    assert failed, f"no test of {bug.pitfall!r} fails with the bug in place {report.trouble}"
    assert any(shows(bug, result) for result in failed), f"no failure matches {bug.symptom!r}:\n{failures(report)}"
    assert any(bug.pitfall in line for line in advice.lines), f"the advice does not name the pitfall: {advice}"
