"""Lesson 13. Suite `routing`: hit rate, balance and time to first token, by policy and number of replicas; simulated.

No model runs: a replica is a cache of blocks, a queue and two rates. The first table has no time, and load is the
blocks that a replica has computed so far; in the second, requests arrive at the trace's times, and load is a replica's
unfinished requests.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.arrivals import generated, read_arrivals
from scripts.bench.common import Report
from scripts.bench.turns import percentile, with_progress

from lessons.l13_machines.simulate import Arrival, Rates, Served, simulate
from lessons.l20_agents.traces import TRACE_BLOCK
from mini_engine.cli.parser import at_least, whole_number
from mini_engine.distributed.routing.policy import Policy, PrefixScore, RoundRobin

CASES = ((4, 3_000), (8, 3_000), (4, 10_000))  # replicas, blocks in the cache of each
SIZES, BLOCKS = (4, 8, 16, 32, 64), 3_000  # of the second table
PREFILL, DECODE = 10_000, 40  # tokens/s of a replica, and of one answer
QUICK = 1_500  # requests


def add_arguments(parser) -> None:
    """Add this suite's options."""
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="a trace as JSON lines (default: generated requests)"
    )
    parser.add_argument("--beta", type=at_least(0), default=1.0, help="weight of load in the score (default: 1)")
    parser.add_argument(
        "--view",
        type=whole_number(1),
        metavar="N",
        help="the router's estimate of a replica's blocks (default: the size of its cache)",
    )


def run(args: Namespace) -> Report:
    """Return a table without time, and one with it."""
    requests = read_arrivals(args.trace) if args.trace else generated()
    requests = requests[:QUICK] if args.quick else requests
    rates = Rates(PREFILL / TRACE_BLOCK, DECODE)
    timed = [(num_replicas, BLOCKS) for num_replicas in SIZES]
    rows, more = table(requests, CASES, args), table(requests, timed, args, rates)
    where = args.trace.name if args.trace else "generated requests"
    notes = [
        f"{where}: {len(requests):,} requests of {total_blocks(requests):,} blocks of {TRACE_BLOCK} tokens, simulated",
        f"second table: {PREFILL} tokens/s of prefill a replica, {DECODE} tokens/s of decode an answer",
    ]
    return Report("routing", rows, notes, more=more)


def policies(beta: float, view: int) -> dict[str, Callable[[], Policy[int]]]:
    """Return the policies to compare, each created once per case. view: blocks that they assume in each replica."""
    return {
        "round robin": RoundRobin,
        "affinity": lambda: PrefixScore(0.0, view),
        "score": lambda: PrefixScore(beta, view),
    }


def table(
    requests: Sequence[Arrival], cases: Sequence[tuple[int, int]], args: Namespace, rates: Rates | None = None
) -> list[dict[str, Any]]:
    """Simulate each case with each policy, and return a row for each."""
    todo = [(case, name) for case in cases for name in policies(args.beta, 1)]
    rows = []
    for (num_replicas, capacity), name in with_progress(todo, "policies"):
        policy = policies(args.beta, args.view or capacity)[name]()
        served = simulate(requests, policy, num_replicas, capacity, rates)
        case = {"replicas": f"{num_replicas} x {capacity:,}", "policy": name}
        rows.append(case | outcome(requests, served, num_replicas) | (waits(served) if rates else {}))
    return rows


def outcome(requests: Sequence[Arrival], served: Sequence[Served], num_replicas: int) -> dict[str, float]:
    """Return the share of blocks found, and the busiest replica's computed blocks relative to the mean."""
    computed = [0] * num_replicas
    for one in served:
        computed[one.replica] += one.num_computed
    found = sum(one.num_found for one in served)
    return {
        "found %": 100 * found / total_blocks(requests),
        "max / mean load": max(computed) * num_replicas / sum(computed),
    }


def waits(served: Sequence[Served]) -> dict[str, float]:
    """Return the median and the 99th percentile of the time to first token."""
    waited = [one.waited for one in served]
    return {"TTFT p50 s": percentile(waited, 50), "TTFT p99 s": percentile(waited, 99)}


def total_blocks(requests: Sequence[Arrival]) -> int:
    return sum(len(one.keys) for one in requests)


def draw(report: Report, path: Path) -> None:
    """Draw for each policy, against the number of replicas, the blocks found, the balance and the median wait."""
    from scripts.bench.plot import MUTED, SERIES, canvas

    rows = report.more
    columns = {"found %": "blocks found, %", "max / mean load": "busiest / mean load", "TTFT p50 s": "median TTFT, s"}
    names = list(dict.fromkeys(row["policy"] for row in rows))
    sizes = list(dict.fromkeys(row["replicas"] for row in rows))
    words = "Blocks found, load and time to first token by policy: only the score finds blocks and keeps the load even"
    with canvas(path, 8.4, 3.4, words) as figure:
        for index, (column, title) in enumerate(columns.items()):
            axes = figure.add_axes((0.06 + 0.325 * index, 0.17, 0.26, 0.7))
            for name, color in zip(names, SERIES, strict=False):
                values = [row[column] for row in rows if row["policy"] == name]
                axes.plot(range(len(sizes)), values, color=color, linewidth=1.8, label=name)
            axes.set_xticks(range(len(sizes)), [size.split(" ")[0] for size in sizes])
            axes.set_xlabel("replicas")
            axes.set_title(title, loc="left", fontsize=10, color=MUTED)
            if column == "found %":
                axes.set_ylim(0)
                axes.legend()
            else:
                axes.set_yscale("log")
