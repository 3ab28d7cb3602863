"""Course machinery. Interleaved timing, and the machine's rates to hold the figures against.

A shared machine changes speed from minute to minute. So contenders take turns, one call each, round by round, and
reading memory may be one of them. Ratios within a run are meaningful; figures from different runs are not comparable.
"""

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track

READ_BYTES = 512 << 20  # many times any processor's cache
MATRIX = 1024  # rows and columns of the matrices used to measure the rate of arithmetic
GPU_READ_BYTES, GPU_MATRIX = 2 << 30, 8192  # a GPU finishes less before a call has returned
Clock = Callable[[], float]
Item = TypeVar("Item")


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

    def columns(self, unit: str = "ms", calls: int = 1) -> dict[str, float]:
        """Return a table's columns: the median and the best of one of `calls` calls, in ms or µs, and the spread."""
        scale = {"ms": 1e3, "µs": 1e6}[unit] / calls
        return {unit: self.median * scale, "best": self.best * scale, "± %": self.spread * 100}


def percentile(values: list[float], part: float) -> float:
    """Return the value below which `part` percent of the values lie, to a tenth; of one value, that value."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=1000, method="inclusive")[round(10 * part) - 1]


def clock_of(args: Namespace) -> Clock:
    """Return processor time for a single thread, which other programs hardly disturb, and otherwise wall clock time."""
    return time.process_time if args.threads == 1 else time.perf_counter


def seconds_of(run: Callable[[], Any], clock: Clock = time.perf_counter) -> float:
    """Return the seconds that a call takes."""
    begun = clock()
    run()
    return clock() - begun


def take_turns(
    contenders: Mapping[Any, Callable[[], Any]], rounds: int, title: str, clock: Clock = time.perf_counter
) -> dict[Any, Timing]:
    """Warm up every contender with one call, then time `rounds` rounds of one call each by `clock`."""
    return gather_turns({name: partial(seconds_of, run, clock) for name, run in contenders.items()}, rounds, title)


def with_progress(items: Iterable[Item], title: str) -> Iterable[Item]:
    """Yield the items, and show on stderr how many are done."""
    return track(items, title, console=Console(stderr=True), transient=True)


def gather_turns(contenders: Mapping[Any, Callable[[], float]], rounds: int, title: str) -> dict[Any, Timing]:
    """Do as `take_turns` does with contenders that return the seconds that count."""
    for run in contenders.values():
        run()
    seconds = {name: [] for name in contenders}
    for _ in with_progress(range(rounds), title):
        for name, run in contenders.items():
            seconds[name].append(run())
    return {name: Timing(taken) for name, taken in seconds.items()}


# ---------------------------------------------------------------- what the machine can do


def read_bytes(device: str) -> int:
    """Return the number of bytes that `memory_reader` reads on this device."""
    return READ_BYTES if device == "cpu" else GPU_READ_BYTES


def memory_reader(device: str = "cpu") -> Callable[[], Any]:
    """Return a contender that reads `read_bytes` with all threads: the maximum of a tensor larger than any cache."""
    import torch

    return torch.ones(read_bytes(device) // 4, device=device).max


def matrix_product(dtype: Any, device: str = "cpu") -> Callable[[], Any]:
    """Return a contender that multiplies square matrices: MATRIX rows on a CPU, GPU_MATRIX on a GPU."""
    import torch

    size = MATRIX if device == "cpu" else GPU_MATRIX
    a = torch.rand(size, size, device=device).to(dtype)  # a GPU is faster with all ones
    return lambda: a @ a


def synchronized(run: Callable[[], Any], device: str) -> Callable[[], Any]:
    """On a GPU, wait until the work is done, not only queued."""
    if device == "cpu":
        return run
    import torch

    def run_and_wait() -> Any:
        out = run()
        torch.cuda.synchronize()
        return out

    return run_and_wait


@dataclass(frozen=True)
class Rates:
    """The machine's limits: bytes read per second, and operations per second in a matrix product, by dtype."""

    read: float
    matrix: dict[str, float]

    def facts(self) -> dict[str, Any]:
        """Return the rates for the report, in GB/s and Gflop/s."""
        matrix = {name: round(rate / 1e9) for name, rate in self.matrix.items()}
        return {"read_gb_s": round(self.read / 1e9, 1), "matrix_gflop_s": matrix}


def measure_rates(device: str = "cpu", seconds: float = 0.3, dtypes: Sequence[str] = ("float32", "bfloat16")) -> Rates:
    """Measure the rates: medians of a few reads and of a few matrix products per dtype. Takes about a second."""
    import torch

    def median_of(run: Callable[[], Any]) -> float:
        run = synchronized(run, device)
        run()
        taken, end = [], time.perf_counter() + seconds
        while not taken or (time.perf_counter() < end and len(taken) < 15):
            taken.append(seconds_of(run))
        return statistics.median(taken)

    read = read_bytes(device) / median_of(memory_reader(device))
    matrix, size = {}, MATRIX if device == "cpu" else GPU_MATRIX
    for name in dtypes:
        matrix[name] = 2 * size**3 / median_of(matrix_product(getattr(torch, name), device))
    return Rates(read, matrix)
