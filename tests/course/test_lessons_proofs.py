"""Course machinery. What must be true of every lesson, proved from its lesson.toml alone.

The reference passes and needs nothing of a later lesson; the fresh starter fails and names its tasks; each task, written
alone, makes its own tests pass; each pitfall's bug is caught and shows its symptom; and a student who does one task after
the other sees the progress grow and ends with green. Two proofs run at a time, in processes forked from a warm one.
"""

import ast
import os
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from lessons._course.catalog import Bug, Lesson, Task, read_lessons
from lessons._course.checker import Check, Report
from lessons._course.places import Places
from lessons._course.progress import Progress
from lessons._course.student import StudentFile, put_aside, start, starter_of, student_files
from lessons._course.verdict import Verdict, judge
from lessons._course.warm import warm_launch

PLACES = Places.find()
LESSONS = read_lessons(PLACES)
NUMBER = re.compile(r"Lesson (\d+)\.")
AT_ONCE = 2
each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.id)
each_task = pytest.mark.parametrize(
    ("lesson", "task"),
    [pytest.param(lesson, task, id=f"{lesson.id}-{task.number}") for lesson in LESSONS for task in lesson.tasks],
)
each_bug = pytest.mark.parametrize(
    ("lesson", "bug"),
    [pytest.param(lesson, bug, id=f"{lesson.id}-{bug.name}") for lesson in LESSONS for bug in lesson.bugs],
)


class Proofs:
    """Runs what the chosen tests will ask for, ahead of them, a few at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pool = ThreadPoolExecutor(AT_ONCE)
        self.launch = warm_launch()
        self.futures: dict[str, Future] = {}

    def expect(self, item: pytest.Item) -> None:
        """Begin with the work of a test of this module."""
        work: Callable | None = getattr(item.function, "work", None)
        if work:
            values = [item.callspec.params[name] for name in ("lesson", "task", "bug") if name in item.callspec.params]
            folder = self.folder / f"{len(self.futures)}"
            self.futures[item.name] = self.pool.submit(partial(work, *values, folder=folder, launch=self.launch))


def ahead(work: Callable) -> Callable:
    """The test's `found` is what `work` gives for its parameters."""

    def mark(test: Callable) -> Callable:
        test.work = work
        return test

    return mark


@pytest.fixture(scope="module")
def proofs(request, tmp_path_factory):
    proofs = Proofs(tmp_path_factory.mktemp("proofs"))
    for item in request.session.items:
        if item.path == request.path:
            proofs.expect(item)
    yield proofs
    proofs.pool.shutdown(cancel_futures=True)


@pytest.fixture
def found(request, proofs):
    return proofs.futures[request.node.name].result()


def written(lesson: Lesson, folder: Path, keep: list[int]) -> list[StudentFile]:
    """Starters with the tasks in `keep` written as in the reference."""
    files = student_files(lesson, Places(PLACES.root, folder))
    for file in files:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        file.path.write_text(starter_of(lesson, file, keep), encoding="utf-8")
    return files


def run_reference(lesson: Lesson, *, folder, launch) -> Report:
    """The lesson's tests and smoke script on the reference, with all that belongs to later lessons out of reach."""
    return Check(lesson, PLACES, files=[], launch=launch, blocked=of_later_lessons(lesson)).run()


def run_starter(lesson: Lesson, *, folder, launch) -> Report:
    return Check(lesson, PLACES, files=written(lesson, folder, []), launch=launch).run()


def run_task(lesson: Lesson, task: Task, *, folder, launch) -> Report:
    files = written(lesson, folder, [task.number])
    return Check(lesson, PLACES, files=files, launch=launch, only=task.tests).run()


def run_bug(lesson: Lesson, bug: Bug, *, folder, launch) -> Report:
    reference = PLACES.root / bug.module
    file = StudentFile(bug.module, reference, folder / reference.name)
    folder.mkdir(parents=True)
    file.path.write_text(file.reference_source.replace(bug.find, bug.replace), encoding="utf-8")
    return Check(lesson, PLACES, files=[file], launch=launch, only=bug.tests).run()


def of_later_lessons(lesson: Lesson) -> dict[str, str]:
    """Modules of the engine and scripts that a later lesson brings, by the first words of their docstrings."""
    blocked = {}
    for path in [*PLACES.root.glob("mini_engine/**/*.py"), *PLACES.root.glob("scripts/*.py")]:
        number = NUMBER.match(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
        if number and int(number[1]) > lesson.number:
            parts = path.relative_to(PLACES.root).with_suffix("").parts
            name = ".".join(parts).removesuffix(".__init__").removeprefix("scripts.")
            blocked[name] = f"it is lesson {number[1]}'s, and lesson {lesson.number} must do without it"
    return blocked


def failures(report: Report) -> str:
    lines = [
        f"{result.test}: {result.outcome} {result.failure.text if result.failure else result.reason}"
        for result in report.results
        if result.outcome not in ("passed", "skipped")
    ]
    return "\n".join([report.trouble, *lines, report.smoke.text, report.smoke.output])


@each_lesson
@ahead(run_reference)
def test_the_reference_passes_and_needs_nothing_of_a_later_lesson(lesson, found):
    assert found.count("passed") and not found.count("failed", "hung", "not run"), failures(found)
    assert found.smoke.state in ("equal", "NOT CHECKED"), failures(found)


@each_lesson
def test_the_lesson_names_no_test_and_no_script_of_a_later_one(lesson):
    later = [other for other in LESSONS if other.number > lesson.number]
    texts = [path.read_text(encoding="utf-8") for name in lesson.tests for path in (PLACES.root / name).rglob("*.py")]
    for other in later:
        for name in (f"l{other.number}_smoke", f"tests/l{other.number}", f"tests.l{other.number}"):
            assert not any(name in text for text in texts), f"a test of lesson {lesson.number} names {name}"
    assert all(number < lesson.number for number in lesson.needs)


@each_lesson
@ahead(run_starter)
def test_the_fresh_starter_fails_and_every_failure_names_an_open_task(lesson, found):
    assert not found.passed
    assert [report.state for report in found.tasks] == ["not written"] * len(lesson.tasks)
    for result in found.results:
        if result.outcome in ("failed", "hung"):
            assert result.failure is not None and result.failure.task is not None, (
                f"{result.test} fails on the starter with something else than a task's message:\n{failures(found)}"
            )
    for report in found.tasks:
        assert any(result.failure and result.failure.task == report.task.number for result in report.results), (
            f"no test of task {report.task.number} runs into it on the fresh starter"
        )


@each_task
@ahead(run_task)
def test_each_task_alone_makes_its_tests_pass(lesson, task, found):
    assert found.results and not found.count("failed", "hung", "not run"), failures(found)
    for test in task.tests:
        assert any(re.match(re.escape(test) + r"($|\[|::)", result.test) for result in found.results), (
            f"{test} is not there: {failures(found)}"
        )


@each_bug
@ahead(run_bug)
def test_each_pitfall_is_caught_and_shows_its_symptom(lesson, bug, found):
    reference = (PLACES.root / bug.module).read_text(encoding="utf-8")
    assert reference.count(bug.find) == 1, f"{bug.find!r} occurs {reference.count(bug.find)} times in {bug.module}"
    if found.count("skipped") == len(found.results) > 0:
        pytest.skip(f"NOT CHECKED: {found.skipped}")
    failed = [result for result in found.results if result.outcome in ("failed", "hung")]
    assert failed, f"no test of {bug.name} fails with it {found.trouble}"
    assert any(result.failure and re.search(bug.symptom, result.failure.text) for result in failed), (
        f"no failure says {bug.symptom!r}:\n{failures(found)}"
    )


class Diary:
    """What a student saw who started, wrote one task after the other, and finished."""

    def __init__(self, lesson: Lesson, folder: Path, launch) -> None:
        self.lesson, self.places, self.launch = lesson, Places(PLACES.root, folder), launch
        self.first = self.check([])
        self.numbers = [task.number for task in lesson.tasks]
        self.steps = [self.check(self.numbers[:count]) for count in range(1, len(self.numbers))]
        self.last = self.check(self.numbers)
        self.same = all(file.source == file.reference_source for file in student_files(lesson, self.places))
        self.kept = put_aside(lesson, self.places)
        self.again = start(lesson, self.places, Progress(folder).entry(lesson))

    def check(self, tasks: list[int]) -> tuple[Verdict, list[int]]:
        """Write `tasks` and check: a whole check first and last, between them only the task just written."""
        written(self.lesson, self.places.work, tasks)
        progress = Progress(self.places.work)
        whole = len(tasks) in (0, len(self.lesson.tasks))
        task = None if whole else tasks[-1]
        verdict = judge(self.lesson, self.places, progress, task=task, launch=self.launch)
        return verdict, Progress(self.places.work).entry(self.lesson).tasks_done


@each_lesson
@ahead(lambda lesson, *, folder, launch: Diary(lesson, folder, launch))
def test_a_student_who_does_one_task_after_the_other_gets_from_red_to_green(lesson, found):
    verdict, done = found.first
    assert not verdict.passed and done == []
    assert verdict.advice.headline == f"Task 1 is not written yet: {lesson.tasks[0].title}."
    assert any("Red is expected" in line for line in verdict.advice.lines)
    assert [done for _, done in found.steps] == [found.numbers[:count] for count in range(1, len(found.numbers))]
    verdict, done = found.last
    assert verdict.passed and done == found.numbers, failures(verdict.report)
    assert verdict.report.smoke.state == "equal"
    assert found.same, "with every task written, the student's file is the reference"
    assert len(found.kept) == len(lesson.modules) == len(found.again), "a reset keeps the old files and starts anew"
