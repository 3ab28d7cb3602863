"""Course machinery. Shared by the benchmark suites: interleaved timing, the machine's facts, tables, the JSON file.

A shared machine changes speed from minute to minute. So contenders take turns, one call each, round by round, and
reading memory may be one of them. Ratios within a run are meaningful; figures from different runs are not comparable.
"""

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from lessons._course.tables import Column, show
from mini_engine.errors import UserError

READ_BYTES = 512 << 20  # many times any processor's cache
MATRIX = 1024  # rows and columns of the matrices used to measure the rate of arithmetic


@dataclass(frozen=True)
class Timing:
    """Seconds of one contender's calls, in order."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def spread(self) -> float:
        """Half the interquartile range, as a fraction of the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median


def percentile(values: list[float], part: int) -> float:
    """Return the value below which `part` percent of the values lie."""
    return statistics.quantiles(values, n=100, method="inclusive")[part - 1]


def take_turns(
    contenders: dict[Any, Callable[[], Any]], rounds: int, title: str, clock: Callable[[], float] = time.perf_counter
) -> dict[Any, Timing]:
    """Warm up every contender with one call, then time `rounds` rounds of one call each by `clock`."""
    for run in contenders.values():
        run()
    seconds = {name: [] for name in contenders}
    for _ in track(range(rounds), title, console=Console(stderr=True), transient=True):
        for name, run in contenders.items():
            started = clock()
            run()
            seconds[name].append(clock() - started)
    return {name: Timing(taken) for name, taken in seconds.items()}


def memory_reader(device: str = "cpu") -> Callable[[], Any]:
    """Return a contender that reads READ_BYTES with all threads: the maximum of a tensor far larger than any cache."""
    import torch

    return torch.ones(READ_BYTES // 4, device=device).max


# ---------------------------------------------------------------- what the machine can do


@dataclass(frozen=True)
class Rates:
    """The machine's limits: bytes read per second, and operations per second in a matrix product, by dtype."""

    read: float
    matrix: dict[str, float]

    def facts(self) -> dict[str, Any]:
        """Return the rates for the report, in GB/s and Gflop/s."""
        matrix = {name: round(rate / 1e9) for name, rate in self.matrix.items()}
        return {"read_gb_s": round(self.read / 1e9, 1), "matrix_gflop_s": matrix}


def measure_rates(device: str = "cpu", seconds: float = 0.3) -> Rates:
    """Measure the rates: medians of a few reads and of a few matrix products per dtype. Takes about a second."""
    import torch

    def median_of(run: Callable[[], Any]) -> float:
        taken, end = [], time.perf_counter() + seconds
        wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        run()
        while not taken or (time.perf_counter() < end and len(taken) < 15):
            wait()
            begun = time.perf_counter()
            run()
            wait()
            taken.append(time.perf_counter() - begun)
        return statistics.median(taken)

    read = READ_BYTES / median_of(memory_reader(device))
    matrix = {}
    for name in ("float32", "bfloat16"):
        a = torch.ones(MATRIX, MATRIX, dtype=getattr(torch, name), device=device)
        matrix[name] = 2 * MATRIX**3 / median_of(lambda a=a: a @ a)
    return Rates(read, matrix)


# ---------------------------------------------------------------- the report


def describe_machine() -> dict[str, Any]:
    """Return processor, versions, load and the state of the source."""
    import torch

    return {
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

    drawn: the column that a plot shows as bars; None if there is nothing to draw.
    more: a second table, with its own columns.
    """

    suite: str
    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=describe_machine)
    drawn: str | None = None
    more: list[dict[str, Any]] = field(default_factory=list)

    def show(self) -> None:
        """Print the notes and the tables. Rows with other columns than those before begin a table of their own."""
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
        return f"{m['cpu']}, {m['threads']} threads, torch {m['torch']}, commit {m['commit']}{state}"

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
