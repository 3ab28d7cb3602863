"""Course machinery. Reports on this machine: its hardware, whether the course runs correctly on it, and how fast.

    python scripts/report.py            everything, at most ten minutes
    python scripts/report.py --quick    a first impression, about a minute
    python scripts/report.py --check build/report/report.json

Writes report.json and report.md and needs no network. Exit codes: 0 if everything that ran is right, 1 if something
failed, 2 for bad input, 130 after Ctrl-C, when both files hold the results so far.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts import first_line

from mini_engine.cli.parser import OneLineParser, guard, whole_number

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
MINUTES, QUICK_MINUTES = 10, 3


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=first_line(__doc__).partition(". ")[2])
    parser.add_argument("--out", type=Path, default=Path("build/report"), metavar="DIR", help="default: build/report")
    parser.add_argument("--quick", action="store_true", help="six lessons and a small model, about a minute")
    parser.add_argument("--minutes", type=whole_number(1), metavar="N", help=f"at most (default: {MINUTES})")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object instead of the page")
    parser.add_argument("--check", type=Path, metavar="FILE", help="only check whether FILE is a report that passes")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Make a report or check one. Return the exit code."""
    os.environ.update(OFFLINE)
    return guard(make_parser(), lambda args: check(args.check) if args.check else make(args), argv)


def make(args: argparse.Namespace) -> int:
    """Measure, write the files, print the page."""
    from scripts.machine.about import describe
    from scripts.machine.page import page_of, save
    from scripts.machine.run import Run, check_place
    from scripts.machine.schema import Report

    check_place(args.out)
    report = Report(datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), args.quick, describe())
    minutes = args.minutes or (QUICK_MINUTES if args.quick else MINUTES)
    stopped = False
    with progress() as bar:
        run = Run(report, 60 * minutes, lambda report: save(report, args.out), bar)
        bar.total = run.num_steps
        try:
            run.everything()
        except KeyboardInterrupt:
            stopped = True
    page = (
        json.dumps(json.loads((args.out / "report.json").read_text(encoding="utf-8"))) if args.json else page_of(report)
    )
    print(page)
    print(f"Written to {args.out / 'report.json'} and report.md.", file=sys.stderr)
    return 130 if stopped else 1 if report.with_status("failed") else 0


class Bar:
    """Shows progress: a bar on a terminal, a line for each step in a pipe."""

    def __init__(self, show) -> None:
        self.total, self.show, self.done, self.began = 0, show, 0, time.monotonic()

    def __call__(self, name: str) -> None:
        """Show the name of the next step."""
        self.done += 1
        self.show(min(self.done, self.total), self.total, name)


@contextmanager
def progress() -> Iterator[Bar]:
    """Show progress on stderr while the block runs."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    if not console.is_terminal:
        yield Bar(lambda done, total, name: print(f"{done}/{total} {name}", file=sys.stderr, flush=True))
        return
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as shown:
        task = shown.add_task("", total=None)
        yield Bar(lambda done, total, name: shown.update(task, completed=done, total=total, description=name))


def check(path: Path) -> int:
    """Print whether a file is a report that passes. Return the exit code."""
    from scripts.machine.page import page_of
    from scripts.machine.stored import read, why_not

    report = read(path)
    print(page_of(report))
    if why := why_not(report):
        print(f"{path} is a report, and the course's page of reports does not take it: {why}.", file=sys.stderr)
        return 1
    print(f"{path} is a report that passes.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
