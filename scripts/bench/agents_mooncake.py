"""Lesson 20. Part `mooncake` of the suite `agents`: the policies on recorded traces, in pools of two sizes."""

from argparse import Namespace

from scripts.bench.common import left_out
from scripts.bench.turns import with_progress

from lessons.l20_agents.compare import BELADY, POLICIES, Row, row_of
from lessons.l20_agents.replay import Replay
from lessons.l20_agents.traces import TRACE_BLOCK, read_mooncake

POOLS, QUICK = (3_000, 10_000), 1_500  # blocks; requests


def mooncake(args: Namespace) -> tuple[list[Row], str]:
    """Return a row for each trace, pool and policy."""
    if not args.trace:
        left_out("mooncake", "it needs --trace FILE")
        return [], "left out: it needs --trace FILE"
    todo = [(path, size) for path in args.trace for size in POOLS]
    rows: list[Row] = []
    for path, size in with_progress(todo, "traces"):
        calls = read_mooncake(path)[: QUICK if args.quick else None]
        done = {name: Replay(calls, make, size).run() for name, make in POLICIES.items()}
        case = {"trace": path.stem, "pool": f"{size:,}"}
        rows += [case | {"policy": name} | row_of(one, done[BELADY]) for name, one in done.items()]
    return rows, f"at the file's times; a session is derived from texts; pools in blocks of {TRACE_BLOCK} tokens"
