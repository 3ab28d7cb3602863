"""Course machinery. The state that every command works with, and the output that several of them share."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lessons._course.catalog import Lesson, choose, read_lessons
from lessons._course.places import COMMAND, Places
from lessons._course.progress import Entry, Progress
from lessons._course.show import View, make_console
from lessons._course.tracks import Syllabus, read_syllabus
from lessons._course.verdict import Verdict, judge

CERTIFICATE = f"For a page that says what you have passed:  {COMMAND} certificate --name YOURS"
AFTERWARDS = (
    CERTIFICATE,
    "After the course: your first pull request to vLLM or SGLang (lessons/capstone.md, with lessons/coming-from.md as",
    "a map), or something of your own with mini_engine (lessons/api.md). Left out here: lessons/whats-not-covered.md.",
)


class Desk:
    """What every command needs: the places, the lessons, the progress, the console."""

    def __init__(self) -> None:
        self.view = View(make_console())
        self.places = Places.find()
        self.lessons = read_lessons(self.places)
        self.syllabus = read_syllabus(self.places, self.lessons)
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
        rows = [lesson_as_dict(lesson, entries[lesson.id], desk.syllabus) for lesson in desk.lessons]
        print(json.dumps({"lessons": rows}))
        return
    desk.view.overview(desk.syllabus, desk.lessons, entries)
    desk.view.line()
    for line in next_steps(desk, entries):
        desk.view.line(line)


def lesson_as_dict(lesson: Lesson, entry: Entry, syllabus: Syllabus) -> dict[str, Any]:
    """For `--json`."""
    kept = {key: asdict(entry)[key] for key in ("started", "tasks_done", "core_passed", "passed", "not_checked")}
    track = syllabus.track_of(lesson.number).id
    times = {"minutes": lesson.minutes, "core_minutes": lesson.core_minutes}
    told = {"number": lesson.number, "id": lesson.id, "title": lesson.title, "track": track}
    return {**told, **times, "tasks": len(lesson.tasks), **kept}


def next_steps(desk: Desk, entries: dict[str, Entry]) -> list[str]:
    """Say what to do next, in a line or two."""
    known = {lesson.number: entries[lesson.id] for lesson in desk.lessons}
    lesson = next_lesson(desk.lessons, known, desk.syllabus)
    if lesson is None:
        return ["You have passed every lesson, or its core.", *AFTERWARDS]
    entry, n = entries[lesson.id], lesson.number
    if entry.started:
        task = entry.next_task(lesson)
        what = f"task {task.number}: {task.title}" if task else "every task is done, but some tests fail"
        return [f"Next:   {COMMAND} check {n}     {what}"]
    lines = [f"Next:   {COMMAND} start {n}     then read {desk.shown(lesson.page)}"]
    if not any(each.started for each in entries.values()):
        return [f"First:  {COMMAND} doctor      is this machine ready?", *lines]
    core = desk.syllabus.core
    if n not in core.lessons and all(known[number].is_behind for number in core.lessons if number in known):
        told = "You have passed the core. Electives come in any order, as far as column After allows."
        return [told, *lines, CERTIFICATE]
    return lines


def say_what_is_next(desk: Desk) -> None:
    """After a lesson has passed: name the next step."""
    for line in next_steps(desk, {lesson.id: desk.progress.entry(lesson) for lesson in desk.lessons}):
        desk.view.line("  " + line)


def next_lesson(lessons: Sequence[Lesson], entries: Mapping[int, Entry], syllabus: Syllabus) -> Lesson | None:
    """Return the lesson to go on with, or None if all are passed, at least in their core.

    A lesson in progress comes first. Of the others, those come last that a student has gone past in the same track,
    since one may begin in the middle, then those whose `needs` are not passed. The core comes before electives.

    Args:
        entries: the progress by lesson number.
    """
    passed = {number for number, entry in entries.items() if entry.is_behind}

    def rank(lesson: Lesson) -> tuple:
        number, place = lesson.number, syllabus.place(lesson.number)
        track = syllabus.track_of(number)
        is_left_out = any(other in passed and syllabus.place(other) > place for other in track.lessons)
        return not entries[number].started, is_left_out, not passed.issuperset(lesson.needs), place

    return min((lesson for lesson in lessons if lesson.number not in passed), key=rank, default=None)


def say_how_to_go_on(desk: Desk, lesson: Lesson) -> None:
    n = lesson.number
    desk.view.line(f"Read:    {desk.shown(lesson.page)}")
    for task in lesson.tasks:
        more = ", beyond the core" if task.is_more else ""
        desk.view.line(f"Task {task.number}:  {task.title}  ({task.symbols}, {task.size}{more})")
    desk.view.line(f"Then:    {COMMAND} check {n}     Expect red the first time: nothing is written yet.")


def run_check(desk: Desk, lesson: Lesson, *, quiet: bool = False, **options) -> Verdict:
    if quiet:
        return judge(lesson, desk.places, desk.progress, **options)
    with desk.view.running(lesson) as watcher:
        return judge(lesson, desk.places, desk.progress, watcher=watcher, **options)
