"""Course machinery. Runs every lesson's smoke script and prints one table.

A lesson is a folder in lessons/ with a lesson.toml, whose `smoke` names the script and its arguments. Each script runs
in its own process with --json, so the table shows the script's own results.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from scripts.smoke.processes import Result, run_all, start_warm
from scripts.smoke.report import equal_prefix

from lessons._course.catalog import Lesson, choose, read_lessons
from lessons._course.places import CourseError, Places
from lessons._course.tables import Column, show
from mini_engine.cli.parser import OneLineParser, settle_streams, whole_number

TAIL = 30  # lines of a failed script's output to show
COLUMNS = [Column("lesson", is_text=True), Column("storage", is_text=True)]
COLUMNS += [Column(title) for title in ("tokens\nequal to HF", "tokens/s\nours", "tokens/s\nHF", "KV bytes")]


def pick_lessons(places: Places, only: list[str] | None) -> list[Lesson]:
    """Return the lessons with a smoke script, or the requested ones. Raises CourseError if there are none."""
    lessons = [lesson for lesson in read_lessons(places) if lesson.smoke]
    if not lessons:
        raise CourseError(f"no lesson in {places.lessons} has a smoke script")
    return lessons if only is None else [choose(lessons, name) for name in only]


def run_all_in_view(lessons: list[Lesson], places: Places, args: argparse.Namespace) -> list[Result]:
    """Run all with a progress line on a terminal or one plain line per lesson in a pipe; return them in order."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    results = []
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(lessons))
        for result in run_all(lessons, places, start_warm(), args.extra, args.jobs, args.timeout):
            results.append(result)
            progress.update(task, advance=1, description=progress_line(result))
            if not console.is_terminal:
                print(progress_line(result), file=sys.stderr, flush=True)
    return sorted(results, key=lambda result: lessons.index(result.lesson))


def progress_line(result: Result) -> str:
    state = "ok" if result.ok else "FAILED"
    return f"lesson {result.lesson.number}: {result.lesson.title}: {state}, {result.seconds:.0f} s"


def print_results(results: list[Result]) -> None:
    """Print the table, the output of failed scripts, and a summary."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    show(console, COLUMNS, [row_of(result) for result in results])
    console.print()
    for result in results:
        for line in result.not_exercised:
            console.print(Text(f"NOT EXERCISED  lesson {result.lesson.number}: {line}", "bold yellow"))
        if not result.ok:
            console.print(f"Lesson {result.lesson.number} failed:", style="bold red")
            console.print(Text(explain(result) + "\n"))
    console.print(summary(results), style="green" if all(result.ok for result in results) else "red")


def row_of(result: Result) -> list:
    """Return a lesson's cells: its storage, equal tokens, speeds, KV bytes."""
    from rich.text import Text

    equal = f"{result.equal_tokens}/{result.tokens}" if result.report else "failed"
    shown = Text(equal, style="green" if result.ok else "bold red")
    speeds = [number(result.tokens_per_second(side)) for side in ("ours", "hf")]
    return [
        f"{result.lesson.number} {result.lesson.title}",
        result.storage,
        shown,
        *speeds,
        number(result.kv.get("bytes")),
    ]


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def explain(result: Result) -> str:
    """Explain why a lesson failed: its script's output, and each request's first difference."""
    lines = result.output.strip().splitlines()[-TAIL:]
    for index, request in enumerate(result.report.get("requests", [])):
        ours, theirs = request["ours"], request["hf"]
        if ours != theirs:
            at = equal_prefix(ours, theirs)
            lines.append(
                f"request {index}: new token {at} differs: Hugging Face {theirs[at : at + 1]}, ours {ours[at : at + 1]}"
            )
    command = " ".join(["python", *result.lesson.smoke])
    return "\n".join([*lines, f"exit code {result.exit_code}; to see more: {command}"])


def summary(results: list[Result]) -> str:
    failed = [str(result.lesson.number) for result in results if not result.ok]
    tokens = sum(result.tokens for result in results)
    if failed:
        return f"{len(failed)} of {len(results)} lessons failed: {', '.join(failed)}."
    which = "the lesson gives" if len(results) == 1 else f"all {len(results)} lessons give"
    return f"Every token is equal: {which} Hugging Face's answers, {tokens} tokens in total."


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description="Run the lessons' smoke scripts and compare with Hugging Face.")
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="0,1", help="only these lessons")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--jobs", type=whole_number(1), default=2, metavar="N", help="scripts at a time (default: 2)")
    parser.add_argument("--timeout", type=float, default=600, metavar="S", help="seconds per script (default: 600)")
    parser.add_argument(
        "extra",
        nargs="*",
        metavar="-- OPTION",
        help="options for each script, after --: -- --device cuda --dtype bfloat16",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every lesson's tokens are equal, 1 if not, 2 for bad input, 130 after Ctrl-C."""
    settle_streams()
    args = parse_args(argv)
    try:
        places = Places.find()
        lessons = pick_lessons(places, args.only)
        if not args.json:
            print(
                f"Running {len(lessons)} smoke scripts, each beside Hugging Face's generate on the same prompts.",
                flush=True,
            )
        results = run_all_in_view(lessons, places, args)
    except CourseError as error:
        print(f"smoke_all.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    match = all(result.ok for result in results)
    if args.json:
        print(json.dumps({"match": match, "lessons": [result.as_json() for result in results]}, indent=2))
    else:
        print_results(results)
    return 0 if match else 1


if __name__ == "__main__":
    sys.exit(main())
