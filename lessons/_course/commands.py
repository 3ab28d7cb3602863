"""Course machinery. What each command of `python -m lessons` does.

A function here takes its command's options by name and returns the process's exit code. Heavy modules are imported only
by the commands that need them, so that the others answer at once.
"""

import json

from lessons._course.compare import shown_reference, side_by_side, solutions, unified
from lessons._course.desk import COMMAND, Desk, run_check, say_how_to_go_on, show_overview
from lessons._course.places import CourseError, Places
from lessons._course.show import View, make_console
from lessons._course.student import put_aside, start_beside, student_files
from lessons._course.student import start as write_starters
from lessons._course.verdict import need_files
from lessons._course.watch import Saves

WIDE = 120


def overview(as_json: bool) -> int:
    """List the lessons, your progress, and what to do next."""
    show_overview(Desk(), as_json)
    return 0


def doctor() -> int:
    """Check that this machine is ready. Ends with a text that the model writes."""
    from lessons._course.doctor import examine

    view, places = View(make_console()), Places.find()
    good = view.findings(examine(places))
    view.line()
    if not good:
        view.line("Something is missing: see above.", "bold red")
        return 1
    view.line(f"All is ready. Next: {COMMAND} start 0", "bold green")
    return 0


def start(number: str, fresh: bool) -> int:
    """Write your copy of lesson N's modules, without the bodies you are to write. Overwrites nothing of yours."""
    desk = Desk()
    lesson, entry = desk.lesson(number)
    n = lesson.number
    had_started = bool(entry.started)
    written = (start_beside if fresh and had_started else write_starters)(lesson, desk.places, entry)
    desk.progress.save(lesson, entry)
    for path in written:
        desk.view.line(f"Written: {desk.shown(path)}")
    if fresh and had_started:
        desk.view.line("Take over what you need from it; `check` goes on using your own file.")
        return 0
    if not written:
        names = ", ".join(desk.shown(file.path) for file in student_files(lesson, desk.places))
        desk.view.line(f"You have started already: {names} stays as it is. A fresh start: {COMMAND} reset {n}")
        return 0
    say_how_to_go_on(desk, lesson)
    return 0


def check(
    number: str, *, task: int | None, verbose: bool, time_limit: float, trace: bool, browser: bool, as_json: bool
) -> int:
    """Run lesson N's tests and smoke script against your file, and say what to do next. Exit code 0: it passes."""
    desk = Desk()
    lesson, _ = desk.lesson(number)
    if trace:
        from lessons._course.trace import show_own_run

        return 0 if show_own_run(desk, lesson, seconds=time_limit, browser=browser, as_json=as_json) else 1
    verdict = run_check(desk, lesson, task=task, seconds=time_limit, quiet=as_json)
    if as_json:
        print(json.dumps(verdict.as_dict()))
    else:
        desk.view.verdict(verdict, verbose)
    return 0 if verdict.passed else 1


def watch(number: str) -> int:
    """Run `check N` again at each save. Ctrl-C ends it."""
    from lessons._course.warm import warm_launch

    desk = Desk()
    lesson, _ = desk.lesson(number)
    files = student_files(lesson, desk.places)
    need_files(files, lesson, desk.places)
    launch = warm_launch()
    saves = Saves([file.path for file in files])
    try:
        while True:
            saves.take()
            desk.view.line(f"Lesson {lesson.number}: {lesson.title}", "bold")
            desk.view.verdict(run_check(desk, lesson, launch=launch))
            desk.view.line(f"Waiting for a save of {', '.join(desk.shown(file.path) for file in files)}. Ctrl-C ends.")
            saves.wait()
    except KeyboardInterrupt:
        desk.view.line("Stopped.")
        return 0


def hint(number: str, task: int | None) -> int:
    """Show the next of a task's three hints; without TASK, of the first task that is not done."""
    desk = Desk()
    lesson, entry = desk.lesson(number)
    chosen = lesson.task(task) if task is not None else entry.next_task(lesson)
    if chosen is None:
        raise CourseError(f"Every task of lesson {lesson.number} is done; name one: {COMMAND} hint {lesson.number} 1")
    key = str(chosen.number)
    seen = min(max(entry.hints.get(key, 0), 0) + 1, len(chosen.hints))
    entry.hints[key] = seen
    desk.progress.save(lesson, entry)
    desk.view.line(f"Task {chosen.number}: {chosen.title} ({chosen.symbols})", "bold")
    for index, text in enumerate(chosen.hints[:seen], 1):
        desk.view.line(f"Hint {index} of {len(chosen.hints)}: {text.strip()}")
    if seen == len(chosen.hints):
        desk.view.line(f"That was the last hint. The reference: {COMMAND} solution {lesson.number} {key} --give-up")
    return 0


def diff(number: str, *, side: bool | None, give_up: bool) -> int:
    """Show your file beside the reference. The bodies of tasks that are not done stay hidden."""
    desk = Desk()
    lesson, entry = desk.lesson(number)
    files = student_files(lesson, desk.places)
    need_files(files, lesson, desk.places)
    everything = give_up or entry.solution_is_open
    shown = [task.number for task in lesson.tasks] if everything else entry.tasks_done
    wide = desk.view.console.is_terminal and desk.view.console.width >= WIDE
    for file in files:
        reference, name = shown_reference(lesson, file, shown), desk.shown(file.path)
        lines = unified(file, reference, name)
        if not lines:
            desk.view.line(f"{name}: no difference.")
        elif wide if side is None else side:
            desk.view.columns(side_by_side(file, reference), name)
        else:
            desk.view.unified(lines)
    if len(shown) < len(lesson.tasks):
        desk.view.line("Tasks not done are left out; --give-up shows them.", "dim")
    return 0


def solution(number: str, task: int | None, *, give_up: bool) -> int:
    """Show the reference's tasks: open once you have passed, or with --give-up."""
    desk = Desk()
    lesson, entry = desk.lesson(number)
    if task is not None:
        lesson.task(task)
    if not (entry.solution_is_open or give_up):
        raise CourseError(
            f"The solution opens once lesson {lesson.number} passes. Before that: {COMMAND} hint {lesson.number}, "
            f"or {COMMAND} solution {lesson.number} --give-up."
        )
    if give_up and not entry.solution_is_open:
        entry.gave_up = True
        desk.progress.save(lesson, entry)
    for file in student_files(lesson, desk.places):
        for title, source in solutions(lesson, file, task):
            desk.view.line(f"# {title}, in {file.module}", "bold")
            desk.view.code(source)
            desk.view.line()
    return 0


def reset(number: str) -> int:
    """Start afresh; your old file is kept beside the new one."""
    desk = Desk()
    lesson, entry = desk.lesson(number)
    for old, kept in put_aside(lesson, desk.places):
        desk.view.line(f"Kept:    {desk.shown(old)} as {kept.name}")
    entry = entry.fresh_start()
    written = write_starters(lesson, desk.places, entry)
    for path in written:
        desk.view.line(f"Written: {desk.shown(path)}")
    if not written:
        desk.view.line("Your files are fresh starters already.")
    desk.progress.save(lesson, entry)
    desk.view.line(f"Then:    {COMMAND} check {lesson.number}")
    return 0
