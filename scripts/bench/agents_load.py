"""Lesson 20. Parts `sessions` and `collapse` of the suite `agents`: policies against the number of agents."""

from argparse import Namespace
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from statistics import median

from scripts.bench.turns import with_progress

from lessons.l20_agents.agents import Load
from lessons.l20_agents.compare import BELADY, POLICIES, Row, row_of
from lessons.l20_agents.replay import Rates, Replay
from lessons.l20_agents.traces import TRACE_BLOCK

AGENTS, QUICK = (8, 16, 24, 32, 40, 48, 64), (16, 32)
POOL = 8192  # blocks
COLLAPSED = 50.0  # percent of Belady's hits


def sessions(args: Namespace) -> tuple[list[Row], str]:
    """Return a row for each number of agents and policy: medians over the seeds."""
    counts = QUICK if args.quick else AGENTS
    rows = curve(counts, args.seeds)
    rates = Rates()
    said = (
        f"a pool of {POOL:,} blocks of {TRACE_BLOCK} tokens, {rates.prefill:,.0f} tokens/s of prefill, "
        f"{rates.decode:.0f} tokens/s of decode an answer; medians of {args.seeds} seeds"
    )
    return rows, said


@cache
def curve(counts: Sequence[int], num_seeds: int) -> list[Row]:
    """Return the rows of `sessions`."""
    todo = [(count, seed) for count in counts for seed in range(num_seeds)]
    found: dict[tuple[int, str], list[Row]] = {}
    for count, seed in with_progress(todo, "loads"):
        trace = Load(agents=count, sessions=2).generate(seed)
        done = {name: Replay(trace, make, POOL).run() for name, make in POLICIES.items()}
        for name, outcome in done.items():
            found.setdefault((count, name), []).append(row_of(outcome, done[BELADY]))
    return [{"agents": f"{count}", "policy": name} | medians(rows) for (count, name), rows in found.items()]


def medians(rows: Sequence[Row]) -> Row:
    """Return the median of each column."""
    return {column: median(row[column] for row in rows) for column in rows[0]}


def collapse(args: Namespace) -> tuple[list[Row], str]:
    """Return for each policy the number of agents from which on it finds less than half of Belady's hits."""
    counts = QUICK if args.quick else AGENTS
    rows = curve(counts, args.seeds)
    found = []
    for name in POLICIES:
        points = [(int(row["agents"]), row["of Belady's %"]) for row in rows if row["policy"] == name]
        good = [count for count, share in points if share >= 90]
        found.append({"policy": name, "90 % up to": max(good, default=None), "half at": crossing(points)})
    return found, "agents; 'half at' is interpolated between two measured numbers of agents"


def crossing(points: Sequence[tuple[int, float]]) -> float | None:
    """Return where a falling line crosses COLLAPSED; None if it does not."""
    for (x, y), (x_next, y_next) in pairwise(points):
        if y >= COLLAPSED > y_next:
            return x + (x_next - x) * (y - COLLAPSED) / (y - y_next)
    return None
