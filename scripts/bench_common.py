"""Course machinery. What the benchmark suites share: taking turns, the machine's facts, the table and the JSON file.

A shared machine changes speed from minute to minute. So contenders run in turns, one call each, round by round, and the
memory's own speed is one of them: ratios within a run mean something, figures from two runs do not.
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
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from mini_engine.errors import UserError

READ_BYTES = 512 << 20  # many times any processor's cache


@dataclass(frozen=True)
class Timing:
    """Seconds of one contender's calls, in the order they were made."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median


def take_turns(contenders: dict[Any, Callable[[], Any]], rounds: int, title: str) -> dict[Any, Timing]:
    """Run every contender once unmeasured, then all of them `rounds` times, one call each in turn."""
    for run in contenders.values():
        run()
    seconds = {name: [] for name in contenders}
    for _ in track(range(rounds), title, console=Console(stderr=True), transient=True):
        for name, run in contenders.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return {name: Timing(taken) for name, taken in seconds.items()}


def memory_reader(device: str = "cpu") -> Callable[[], Any]:
    """A contender that reads READ_BYTES once, with all threads: the sum of a tensor far larger than any cache."""
    import torch

    return torch.ones(READ_BYTES // 4, device=device).sum


# ---------------------------------------------------------------- the report


def describe_machine() -> dict[str, Any]:
    """Processor, versions, load and the state of the source."""
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
    """What the processor calls itself."""
    with suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def git(*arguments: str) -> str:
    """What git answers in this repository; empty where there is no git."""
    with suppress(OSError):
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, encoding="utf-8", errors="replace"
        )
        return done.stdout.strip()
    return ""


@dataclass
class Report:
    """What a suite found. `rows` are what the table shows and the file holds; a note is a sentence above the table."""

    suite: str
    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=describe_machine)

    def show(self) -> None:
        """Print the notes and one table; what the first column repeats is shown once."""
        console = Console()
        if not console.is_terminal:
            console.width = 120  # a pipe has no width; nothing in it should be wrapped
        for line in (self.headline, *self.notes):
            console.print(line, markup=False, highlight=False)
        table = Table()
        for name, value in self.rows[0].items():
            table.add_column(name, justify="left" if isinstance(value, str) else "right")
        shown = None
        for row in self.rows:
            first, *figures = row.values()
            table.add_row("" if first == shown else format_figure(first), *map(format_figure, figures))
            shown = first
        console.print(table)

    @property
    def headline(self) -> str:
        m = self.machine
        state = ", with changes" if m["dirty"] else ""
        return f"{m['cpu']}, {m['threads']} threads, torch {m['torch']}, commit {m['commit']}{state}"

    def write(self, path: Path) -> None:
        """Write everything as one JSON object.

        Raises:
            UserError: the file cannot be written.
        """
        try:
            path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from error


def format_figure(value: Any) -> str:
    """Text as it is, numbers to three figures, nothing for None."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
