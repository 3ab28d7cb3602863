"""Course machinery. Runs every lesson's smoke script and prints one table.

A lesson is a folder in lessons/ with a lesson.toml, whose `smoke` names the script and its arguments. Each script runs
in its own process with --json, so the table shows what the script itself found.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lessons._course.catalog import Lesson, choose, read_lessons
from lessons._course.places import CourseError, Places
from mini_engine.cli.parser import OneLineParser, settle_streams

TAIL = 30  # lines of a failed script's output to show


@dataclass
class Result:
    """The result of a lesson's smoke script. report: the object that it printed, empty if it printed none."""

    lesson: Lesson
    exit_code: int
    seconds: float
    output: str
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and self.report.get("match") is True

    @property
    def storage(self) -> str:
        return str(self.kv.get("layout", ""))

    @property
    def kv(self) -> dict[str, Any]:
        return self.report.get("kv", {})

    @property
    def tokens(self) -> int:
        """Number of new tokens from Hugging Face, over all requests."""
        return sum(len(request["hf"]) for request in self.report.get("requests", []))

    @property
    def equal_tokens(self) -> int:
        """Number of equal new tokens, counted up to each request's first difference."""
        return sum(equal_prefix(request["ours"], request["hf"]) for request in self.report.get("requests", []))

    def tokens_per_second(self, side: str) -> float | None:
        """Return the speed of `ours` or `hf`; None if the report lacks the time."""
        count = sum(len(request[side]) for request in self.report.get("requests", []))
        seconds = self.report.get("seconds", {}).get(side)
        return count / seconds if seconds else None

    def as_json(self) -> dict[str, Any]:
        return {
            "number": self.lesson.number,
            "title": self.lesson.title,
            "storage": self.storage,
            "match": self.ok,
            "exit_code": self.exit_code,
            "tokens": self.tokens,
            "equal_tokens": self.equal_tokens,
            "tokens_per_second": {side: self.tokens_per_second(side) for side in ("ours", "hf")},
            "seconds": self.seconds,
            "report": self.report,
        }


def equal_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the number of tokens before the first difference."""
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def pick_lessons(places: Places, only: list[str] | None) -> list[Lesson]:
    """Return the lessons with a smoke script, or the requested ones. Raises CourseError if there are none."""
    lessons = [lesson for lesson in read_lessons(places) if lesson.smoke]
    if not lessons:
        raise CourseError(f"no lesson in {places.lessons} has a smoke script")
    return lessons if only is None else [choose(lessons, name) for name in only]


def environment() -> dict[str, str]:
    """Return the caller's environment, with UTF-8 output and with threads that sleep while they wait.

    On a busy machine, spinning threads compete with the threads they wait for: ten times slower, measured on two cores.
    """
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONUTF8": "1"}


def run_lesson(lesson: Lesson, extra: Sequence[str], root: Path, timeout: float) -> Result:
    """Run a lesson's smoke script with --json. A script that hangs is killed after `timeout` seconds."""
    command = [sys.executable, *lesson.smoke, *extra, "--json"]
    started = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return Result(lesson, 1, timeout, f"still running after {timeout:.0f} s, so it was stopped")
    seconds = time.perf_counter() - started
    try:
        report = json.loads(done.stdout)
    except json.JSONDecodeError:
        return Result(lesson, done.returncode or 1, seconds, done.stderr + done.stdout)
    return Result(lesson, done.returncode, seconds, done.stderr, report)


def run_all(lessons: list[Lesson], args: argparse.Namespace, root: Path) -> list[Result]:
    """Run them one after another, with a progress line on a terminal or one plain line per lesson in a pipe."""
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
        for lesson in lessons:
            progress.update(task, description=f"Lesson {lesson.number}: {lesson.title}")
            results.append(run_lesson(lesson, args.extra, root, args.timeout))
            progress.advance(task)
            if not console.is_terminal:
                print(progress_line(results[-1]), file=sys.stderr, flush=True)
    return results


def progress_line(result: Result) -> str:
    state = "ok" if result.ok else "FAILED"
    return f"lesson {result.lesson.number}: {result.lesson.title}: {state}, {result.seconds:.0f} s"


def print_results(results: list[Result]) -> None:
    """Print the table, the output of failed scripts, and a summary."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    console.print(make_table(results), soft_wrap=False)
    for result in results:
        if not result.ok:
            console.print(f"Lesson {result.lesson.number} failed:", style="bold red")
            console.print(Text(explain(result) + "\n"))
    console.print(summary(results), style="green" if all(result.ok for result in results) else "red")


def make_table(results: list[Result]):
    """Return a table with a row per lesson: its storage, equal tokens, speeds, KV bytes."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("\nlesson")
    table.add_column("\nstorage", no_wrap=True)
    for heading in ("tokens\nequal to HF", "tokens/s\nours", "tokens/s\nHF", "\nKV bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        equal = f"{result.equal_tokens}/{result.tokens}" if result.report else "failed"
        cells = [Text(f"{result.lesson.number} {result.lesson.title}"), Text(result.storage)]
        cells.append(Text(equal, style="green" if result.ok else "bold red"))
        cells += [Text(number(result.tokens_per_second(side))) for side in ("ours", "hf")]
        cells.append(Text(number(result.kv.get("bytes"))))
        table.add_row(*cells)
    return table


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def explain(result: Result) -> str:
    """Say why a lesson failed: its script's output, and each request's first difference."""
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
        results = run_all(lessons, args, places.root)
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
