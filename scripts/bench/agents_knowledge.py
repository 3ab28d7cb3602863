"""Lesson 20. Part `knowledge` of the suite `agents`: what sessions owe to the queue, and what to references."""

from argparse import Namespace
from collections.abc import Hashable

from scripts.bench.agents_load import POOL
from scripts.bench.turns import with_progress

from lessons.l20_agents.agents import Load
from lessons.l20_agents.compare import BELADY, POLICIES, Maker, Row, row_of
from lessons.l20_agents.replay import Replay
from mini_engine.agents.session import Limits
from mini_engine.agents.sessions import Sessions

AGENTS, QUICK = (24, 32, 48), (16,)


class Deaf(Sessions):
    """Sessions that are not told of the queue."""

    def waits(self, session: Hashable, namespace: Hashable) -> None:
        """Ignore the queue."""


KNOWN: dict[str, Maker] = {
    "last use (LRU)": POLICIES["LRU"],
    "and sessions": lambda replay: Deaf(Limits.of_pool(replay.num_blocks), clock=lambda: replay.now),
    "and the queue": lambda replay: Sessions(Limits(0, 0), clock=lambda: replay.now),
    "and both": POLICIES["sessions"],
    "the future": POLICIES[BELADY],
}


def knowledge(args: Namespace) -> tuple[list[Row], str]:
    """Return a row for each number of agents and each kind of knowledge."""
    rows: list[Row] = []
    counts = QUICK if args.quick else AGENTS
    for count in with_progress(counts, "knowledge"):
        trace = Load(agents=count, sessions=2).generate(0)
        done = {name: Replay(trace, make, POOL).run() for name, make in KNOWN.items()}
        best = done["the future"]
        rows += [{"agents": f"{count}", "known": name} | row_of(one, best) for name, one in done.items()]
    return rows, f"as in `sessions`, one seed, a pool of {POOL:,} blocks; with the queue alone, no session is held"
