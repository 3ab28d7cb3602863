"""Course machinery. `python -m lessons play evictor`: writes an example, runs the contest, prints its table."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import date
from pathlib import Path

from rich.progress import track

from lessons._course.places import COMMAND, CourseError
from lessons._course.show import View, make_console
from lessons._course.tables import Column, show
from lessons.l20_agents.contest import LOAD, POOL, YOURS, Score, contest
from lessons.l20_agents.guarded import EXAMPLE

TITLES = ["", "hits %\nday", "of\nBelady's", "hits %\nkept back", "of\nBelady's", "first token\np99 s"]
MEANING = (
    "`day` is the same for all who play today. `kept back` is drawn from a digest of",
    "your file, so each file has another one: compare shares of Belady's hits there.",
    "It shows that a file was not fitted to the load of the day. It does not show",
    "that only one file was tried, nor what the evictor does under other traffic.",
)


def write_example(path: Path) -> int:
    """Write an evictor to begin with. Never overwrites a file."""
    try:
        with path.open("x", encoding="utf-8", newline="\n") as file:
            file.write(EXAMPLE)
    except FileExistsError:
        raise CourseError(f"{path} exists and is unchanged; give --example another name") from None
    except OSError as error:
        raise CourseError(f"{path} cannot be written: {error.strerror}") from None
    print(f"Written: {path}\nThen:    {COMMAND} play evictor {path}")
    return 0


def play_evictor(path: Path | None, seed: int | None, as_json: bool) -> int:
    """Score a file's evictor; without a file, only the course's policies."""
    score = contest(path, date.today().toordinal() if seed is None else seed, progress)
    if as_json:
        print(json.dumps(asdict(score)))
    else:
        show_score(score, path)
    return 0


def progress(names: list[str]) -> Iterator[str]:
    """Show on stderr how far the contest is."""
    yield from track(names, "policies", console=make_console(stderr=True), transient=True, disable=not sys.stderr)


def show_score(score: Score, path: Path | None) -> None:
    """Print the table, and what it says."""
    console = make_console()
    view = View(console)
    view.line(f"{LOAD.agents} agents and a crowd, a pool of {POOL:,} blocks; the day's seed is {score.seed}")
    view.line()
    keys = ["hits %", "of Belady's %"]
    rows = []
    for row in score.rows:
        figures = [row[f"{load}: {key}"] for load in ("day", "kept back") for key in keys]
        name = f"{row['policy']} ({path.name})" if path and row["policy"] == YOURS else row["policy"]
        rows.append([name, *[f"{one:.1f}" for one in figures], f"{row['kept back: first token p99 s']:.1f}"])
    show(console, [Column(TITLES[0], True), *map(Column, TITLES[1:])], rows)
    view.line()
    for line in MEANING if path else (f"Yours is missing: {COMMAND} play evictor --example my_evictor.py",):
        view.line(line)
