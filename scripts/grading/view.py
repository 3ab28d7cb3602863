"""Course machinery. The view of grading: a bar while it runs, then a table with a line for each student."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from scripts.grading.formats import totals
from scripts.grading.points import Graded

from lessons._course.show import make_console
from lessons._course.tables import Column, show

T = TypeVar("T")


def counted(jobs: Sequence[T], name: Callable[[T], str]) -> Iterator[T]:
    """Yield the jobs, with a progress bar on a terminal, or in a pipe a plain line for each one that is finished."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = make_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(jobs))
        for job in jobs:
            progress.update(bar, description=name(job))
            yield job
            progress.advance(bar)
            if not console.is_terminal:
                print(f"graded: {name(job)}", file=sys.stderr, flush=True)


def show_class(found: Mapping[str, Sequence[Graded]]) -> None:
    """Print a line for each student; below it, the first finding of each unfinished lesson."""
    console = make_console()
    lessons = [one.lesson for one in next(iter(found.values()))]
    columns = [Column("student", is_text=True), *(Column(f"lesson {number}") for number in lessons), Column("points")]
    rows = []
    for student, results in found.items():
        points, most = totals(results)
        rows.append([student, *(f"{one.points} of {one.most}" for one in results), f"{points} of {most}"])
    show(console, columns, rows)
    for student, results in found.items():
        for one in results:
            if one.finding:
                said = f"{student}, lesson {one.lesson}: {one.finding.splitlines()[0]}"
                console.print(said, style="dim", markup=False, soft_wrap=not console.is_terminal)
