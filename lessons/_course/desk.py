"""Course machinery. The state that every command works with, and the output that several of them share."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from lessons._course.catalog import Lesson, choose, read_lessons
from lessons._course.places import COMMAND, Places
from lessons._course.progress import Entry, Progress
from lessons._course.show import View, make_console
from lessons._course.verdict import Verdict, judge

AFTERWARDS = (
    "After the course: your first pull request to vLLM or SGLang (lessons/capstone.md, with lessons/coming-from.md as",
    "a map), or something of your own with mini_engine (lessons/api.md). Left out here: lessons/whats-not-covered.md.",
)


class Desk:
    """What every command needs: the places, the lessons, the progress, the console."""

    def __init__(self) -> None:
        self.view = View(make_console())
        self.places = Places.find()
        self.lessons = read_lessons(self.places)
        self.progress = Progress(self.places.work)
        if self.progress.warning:
            make_console(stderr=True).print(self.progress.warning, style="yellow")

    def lesson(self, name: str) -> tuple[Lesson, Entry]:
        lesson = choose(self.lessons, name)
        return lesson, self.progress.entry(lesson)

    def shown(self, path) -> str:
        return self.places.shown(path)


def show_overview(desk: Desk, as_json: bool) -> None:
    entries = {lesson.id: desk.progress.entry(lesson) for lesson in desk.lessons}
    if as_json:
        rows = [
            {"number": x.number, "id": x.id, "title": x.title, "minutes": x.minutes, "tasks": len(x.tasks)}
            | {key: asdict(entries[x.id])[key] for key in ("started", "tasks_done", "passed", "not_checked")}
            for x in desk.lessons
        ]
        print(json.dumps({"lessons": rows}))
        return
    desk.view.overview(desk.lessons, entries)
    desk.view.line()
    for line in next_steps(desk, entries):
        desk.view.line(line)


def next_steps(desk: Desk, entries: dict[str, Entry]) -> list[str]:
    """Say what to do next, in a line or two."""
    lesson = next_lesson(desk.lessons, {x.number: entries[x.id] for x in desk.lessons})
    if lesson is None:
        return ["You have passed every lesson.", *AFTERWARDS]
    entry, n = entries[lesson.id], lesson.number
    if not entry.started and entries[desk.lessons[-1].id].passed:
        left = ", ".join(str(x.number) for x in desk.lessons if not entries[x.id].passed)
        return [f"You have passed the last lesson. Left out: {left} ({COMMAND} start {n})", *AFTERWARDS]
    if not entry.started:
        first = not any(e.started for e in entries.values())
        doctor = [f"First:  {COMMAND} doctor      is this machine ready?"] if first else []
        return [*doctor, f"Next:   {COMMAND} start {n}     then read {desk.shown(lesson.page)}"]
    task = entry.next_task(lesson)
    what = f"task {task.number}: {task.title}" if task else "every task is done, but some tests fail"
    return [f"Next:   {COMMAND} check {n}     {what}"]


def say_what_is_next(desk: Desk) -> None:
    """After a lesson has passed: name the next step."""
    for line in next_steps(desk, {lesson.id: desk.progress.entry(lesson) for lesson in desk.lessons}):
        desk.view.line("  " + line)


def next_lesson(lessons: Sequence[Lesson], entries: Mapping[int, Entry]) -> Lesson | None:
    """Return the lesson to go on with, or None if all are passed.

    A lesson in progress comes first, then those after the last one passed (a student may begin in the middle), and
    among these the ones whose `needs` are passed.

    Args:
        entries: the progress by lesson number.
    """
    passed = {number for number, entry in entries.items() if entry.passed}
    last = max(passed, default=-1)

    def rank(lesson: Lesson) -> tuple[bool, bool, bool, int]:
        number = lesson.number
        return not entries[number].started, number < last, not passed.issuperset(lesson.needs), number

    return min((lesson for lesson in lessons if lesson.number not in passed), key=rank, default=None)


def say_how_to_go_on(desk: Desk, lesson: Lesson) -> None:
    n = lesson.number
    desk.view.line(f"Read:    {desk.shown(lesson.page)}")
    for task in lesson.tasks:
        desk.view.line(f"Task {task.number}:  {task.title}  ({task.symbols}, {task.size})")
    desk.view.line(f"Then:    {COMMAND} check {n}     Expect red the first time: nothing is written yet.")


def run_check(desk: Desk, lesson: Lesson, *, quiet: bool = False, **options) -> Verdict:
    if quiet:
        return judge(lesson, desk.places, desk.progress, **options)
    with desk.view.running(lesson) as watcher:
        return judge(lesson, desk.places, desk.progress, watcher=watcher, **options)
