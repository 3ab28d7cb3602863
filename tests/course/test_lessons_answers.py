"""Course machinery. Right answers pass in silence; wrong ones fail at their own task, with a message about the mistake.

Without these tests, a right answer could be refused, and a wrong one pass or be told of another task. The answers
are in each lesson's `answers.toml`. Of a wrong one, the task's number and what its `says` asks for must be told.
"""

import io
import os
import re

import pytest
from rich.console import Console

from lessons._course.answers import Answer, Answers, apply, read_answers
from lessons._course.catalog import Lesson
from lessons._course.places import Places
from lessons._course.progress import Progress
from lessons._course.show import View
from lessons._course.student import start, student_files
from lessons._course.verdict import Verdict, judge
from lessons._course.warm import warm_launch
from tests.course.proofs import LESSONS, PATIENCE, PLACES, ahead

HOME = (PLACES.root / "lessons/README.md").read_text(encoding="utf-8")
ANSWERS: dict[str, Answers] = {lesson.id: read_answers(lesson) for lesson in LESSONS if lesson.tasks}
each_round = pytest.mark.parametrize(
    ("lesson", "number"),
    [
        pytest.param(lesson, number, id=f"{lesson.id.partition('_')[0]}_-round-{number}")
        for lesson in LESSONS
        if lesson.id in ANSWERS
        for number in range(len(ANSWERS[lesson.id].rounds()))
    ],
)
each_mistake = pytest.mark.parametrize(
    ("lesson", "answer"),
    [
        pytest.param(lesson, answer, id=f"{lesson.id.partition('_')[0]}_-{answer.task}-{answer.name}")
        for lesson in LESSONS
        if lesson.id in ANSWERS
        for answer in ANSWERS[lesson.id].wrong
    ],
)


def hand_in(lesson: Lesson, answers: list[Answer], folder, launch, *, done: list[int]) -> Verdict:
    """Check a finished lesson with these answers in it, as a student who had done the tasks `done` before."""
    places = Places(PLACES.root, folder / "work")
    progress = Progress(places.work)
    entry = progress.entry(lesson)
    files = student_files(lesson, places)
    start(lesson, places, entry)
    entry.tasks_done = done
    progress.save(lesson, entry)
    sources = apply(lesson, answers, {file.module: file.reference_source for file in files})
    for file in files:
        file.path.write_text(sources[file.module], encoding="utf-8")
    return judge(lesson, places, progress, launch=launch, seconds=PATIENCE)


def run_round(lesson: Lesson, number: int, *, folder, launch) -> Verdict:
    answers = ANSWERS[lesson.id].rounds()[number]
    return hand_in(lesson, answers, folder, launch, done=[])


def run_mistake(lesson: Lesson, answer: Answer, *, folder, launch) -> Verdict:
    others = [task.number for task in lesson.tasks if task.number != answer.task]
    return hand_in(lesson, [answer], folder, launch, done=others)


def printed(verdict: Verdict) -> str:
    """Return what `check` prints."""
    console = Console(file=io.StringIO(), width=80, highlight=False)
    View(console).verdict(verdict)
    return console.file.getvalue()


@pytest.mark.parametrize("lesson", [lesson for lesson in LESSONS if lesson.id in ANSWERS], ids=lambda lesson: lesson.id)
def test_every_answer_can_be_written_into_the_reference(lesson, tmp_path):
    sources = {file.module: file.reference_source for file in student_files(lesson, Places(PLACES.root, tmp_path))}
    for answer in (*ANSWERS[lesson.id].right, *ANSWERS[lesson.id].wrong):
        written = apply(lesson, [answer], sources)  # CourseError: what it changes is not there any more
        assert written != sources, f"{answer.name!r} of task {answer.task} is the reference"


@pytest.mark.nightly
@each_round
@ahead(run_round)
def test_right_answers_pass(lesson, number, found):
    text = printed(found)
    assert found.passed, f"an answer of this round is refused:\n{text}"
    assert not found.notes and "Your code printed" not in text, f"a right answer passes in silence:\n{text}"


@pytest.mark.nightly
@each_mistake
@ahead(run_mistake)
def test_a_mistake_is_told_at_its_own_task(lesson, answer, found):
    text = printed(found)
    assert not found.passed, f"this wrong answer passes: {answer.name}"
    assert found.advice.result.task == answer.task, f"the check does not name task {answer.task}:\n{text}"
    assert re.search(answer.says, text), f"the check does not say {answer.says!r}:\n{text}"


@pytest.mark.nightly
def test_the_front_page_shows_what_check_prints(tmp_path):
    """One mistake in lesson 2 and one round of right answers: the page's copy is what a reader will see."""
    lesson = next(lesson for lesson in LESSONS if lesson.id == "l2_token_flat")
    mistake = next(answer for answer in ANSWERS[lesson.id].wrong if answer.name == "the blocks stay on the free list")
    shown = dict(re.findall(r'<div class="turns-(red|green)" markdown="1">\n\n```text\n(.*?)```', HOME, re.DOTALL))
    red = run_mistake(lesson, mistake, folder=tmp_path / "red", launch=warm_launch())
    assert shown["red"] in printed(red).replace(f"{tmp_path / 'red'}{os.sep}", "")
    assert shown["green"] in printed(run_round(lesson, 0, folder=tmp_path / "green", launch=warm_launch()))


@pytest.mark.parametrize("lesson", [lesson for lesson in LESSONS if lesson.tasks], ids=lambda lesson: lesson.id)
def test_each_task_has_its_right_and_wrong_answers(lesson):
    answers = ANSWERS[lesson.id]
    for task in lesson.tasks:
        right = [answer.name for answer in answers.right if answer.task == task.number]
        wrong = [answer.name for answer in answers.wrong if answer.task == task.number]
        assert len(set(right)) >= 2, f"task {task.number} has the alternatives {right}, and needs two"
        assert len(set(wrong)) >= 3, f"task {task.number} has the mistakes {wrong}, and needs three"
    assert all(answer.says for answer in answers.wrong), "a mistake says what the check must print about it"
