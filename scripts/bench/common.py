"""Course machinery. A suite's report: the machine's facts, tables, the JSON file."""

import json
import os
import platform
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from rich.console import Console

from lessons._course.tables import Column, show
from mini_engine.base.errors import UserError


def describe_machine() -> dict[str, Any]:
    """Return processor, versions, load and the state of the source."""
    import torch

    return {
        "date": date.today().isoformat(),
        "cpu": processor_name(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": git("rev-parse", "--short", "HEAD") or "unknown",
        "dirty": bool(git("status", "--porcelain")),
    }


def processor_name() -> str:
    """Return the processor's own name."""
    with suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def git(*arguments: str) -> str:
    """Return git's output in this repository; empty without git."""
    with suppress(OSError):
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, encoding="utf-8", errors="replace"
        )
        return done.stdout.strip()
    return ""


@dataclass
class Report:
    """The results of a suite. `rows` go into the table and the file; a note is a sentence above the table.

    more: a second table, with its own columns.
    """

    suite: str
    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=describe_machine)
    more: list[dict[str, Any]] = field(default_factory=list)

    def show(self) -> None:
        """Print the notes and the tables. Rows with other columns than the previous ones begin a new table."""
        console = Console(highlight=False)
        for line in (self.headline, self.limits, *self.notes):
            console.print(line, markup=False, soft_wrap=True)
        for _, rows in groupby([*self.rows, *self.more], key=tuple):
            console.print()
            print_table(console, list(rows))

    @property
    def headline(self) -> str:
        m = self.machine
        state = ", with changes" if m["dirty"] else ""
        when = f", {m['date']}" if "date" in m else ""
        gpu = f"{m['gpu']}, " if m.get("gpu") else ""
        return f"{gpu}{m['cpu']}, {m['threads']} threads, torch {m['torch']}, commit {m['commit']}{state}{when}"

    @property
    def limits(self) -> str:
        """The machine's rates in this run. A shared machine's differ several times over between runs."""
        if "read_gb_s" not in self.machine:
            return "the machine's rates were not measured"
        matrix = ", ".join(f"{rate} Gflop/s in {dtype}" for dtype, rate in self.machine["matrix_gflop_s"].items())
        return f"measured in this run: memory reads at {self.machine['read_gb_s']} GB/s, matrix products at {matrix}"

    def write(self, path: Path) -> None:
        """Write everything as one JSON object. Raises UserError if that is impossible."""
        save_text(path, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")


def print_table(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print rows with the same columns. The first columns that hold text name a row; the first shows a value once."""
    columns = [Column(name, any(isinstance(row[name], str) for row in rows)) for name in rows[0]]
    names = list(takewhile(lambda column: column.is_text, columns))
    cells, shown = [], None
    for row in rows:
        first, *figures = row.values()
        cells.append(["" if first == shown else format_figure(first), *map(format_figure, figures)])
        shown = first
    show(console, columns, cells, keys=max(1, len(names)))


def left_out(name: str, why: object) -> None:
    """Say on stderr why a contender is not measured."""
    sys.stderr.write(f"left out: {name}; {why}\n")


def save_text(path: Path, text: str) -> None:
    """Write a file, or raise a UserError that names it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error


def format_figure(value: Any) -> str:
    """Format a cell: text unchanged, numbers to three figures, None as empty."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
