"""Course machinery. The commands of `python -m lessons`. They import no torch, so that they answer at once."""

import json
import sys
from typing import Annotated

import typer

from lessons._course.checker import TOTAL_SECONDS
from lessons._course.compare import shown_reference, side_by_side, solutions, unified
from lessons._course.desk import COMMAND, Desk, run_check, say_how_to_go_on, show_overview
from lessons._course.places import CourseError, Places
from lessons._course.show import View, make_console
from lessons._course.student import put_aside, start_beside, student_files
from lessons._course.student import start as write_starters
from lessons._course.verdict import need_files
from lessons._course.watch import Saves

LessonArgument = Annotated[str, typer.Argument(metavar="N", help="the lesson's number")]
TaskArgument = Annotated[int | None, typer.Argument(metavar="[TASK]", help="the task's number")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]
WIDE = 120

app = typer.Typer(
    help="The course's commands. Without one: the lessons, your progress, and what to do next.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def overview(context: typer.Context, as_json: AsJson = False) -> None:
    if context.invoked_subcommand is None:
        show_overview(Desk(), as_json)


@app.command()
def doctor() -> None:
    """Is this machine ready? Ends with a text that the model writes."""
    from lessons._course.doctor import examine  # here, not above: the list is not to wait for it

    view, places = View(make_console()), Places.find()
    good = view.findings(examine(places))
    view.line()
    if not good:
        view.line("Something is missing: see above.", "bold red")
        raise typer.Exit(1)
    view.line(f"All is ready. Next: {COMMAND} start 0", "bold green")


@app.command()
def start(
    number: LessonArgument,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Write a fresh starter beside your file, which stays.")
    ] = False,
) -> None:
    """Write your copy of lesson N's module, with the parts to write left out. Nothing of yours is overwritten."""
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
        return
    if not written:
        names = ", ".join(desk.shown(file.path) for file in student_files(lesson, desk.places))
        desk.view.line(f"You have started already: {names} stays as it is. A fresh start: {COMMAND} reset {n}")
        return
    say_how_to_go_on(desk, lesson)


@app.command()
def check(
    number: LessonArgument,
    task: Annotated[int | None, typer.Option("--task", metavar="K", help="Only the tests of task K.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the first failure in full.")] = False,
    time_limit: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="For all of it.")] = TOTAL_SECONDS,
    trace: Annotated[
        bool, typer.Option("--trace", help="Instead of tests: your own run as a picture that plays.")
    ] = False,
    browser: Annotated[bool, typer.Option("--open/--no-open", help="With --trace: open the page in a browser.")] = True,
    as_json: AsJson = False,
) -> None:
    """Run lesson N's tests and smoke script against your file, and say what to do next. Exit code 0: it passes."""
    desk = Desk()
    lesson, _ = desk.lesson(number)
    if trace:
        from lessons._course.trace import show_own_run  # here, not above: few runs need it

        raise typer.Exit(0 if show_own_run(desk, lesson, seconds=time_limit, browser=browser, as_json=as_json) else 1)
    verdict = run_check(desk, lesson, task=task, seconds=time_limit, quiet=as_json)
    if as_json:
        print(json.dumps(verdict.as_dict()))
    else:
        desk.view.verdict(verdict, verbose)
    raise typer.Exit(0 if verdict.passed else 1)


@app.command()
def watch(number: LessonArgument) -> None:
    """`check N`, again at each save. Ctrl-C ends it."""
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


@app.command()
def hint(number: LessonArgument, task: TaskArgument = None) -> None:
    """The next of a task's three hints; without TASK, of the first task that is not done."""
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


@app.command()
def diff(
    number: LessonArgument,
    side: Annotated[bool | None, typer.Option("--side-by-side/--unified", help="Default: by width.")] = None,
    give_up: Annotated[bool, typer.Option("--give-up", help="Show tasks that you have not done, too.")] = False,
) -> None:
    """Your file beside the reference. The bodies of tasks that are not done stay hidden."""
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


@app.command()
def solution(
    number: LessonArgument,
    task: TaskArgument = None,
    give_up: Annotated[bool, typer.Option("--give-up", help="Open it before the lesson passes.")] = False,
) -> None:
    """The reference's tasks: open once you have passed, or with --give-up."""
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


@app.command()
def reset(number: LessonArgument) -> None:
    """A fresh start; your old file is kept beside the new one."""
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


def main() -> None:
    """Run the command line; a mistake of the user's is one sentence and exit code 2."""
    encoding = "utf-8" if sys.platform == "win32" else None  # there a pipe or a file would get a code page
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding=encoding, errors="replace")
    try:
        app(prog_name=COMMAND)
    except CourseError as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        sys.exit(2)
