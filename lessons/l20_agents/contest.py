"""Lesson 20. `play evictor`: scores an evictor against the course's policies, on two generated loads.

One load is the same for all who play on a day. The other one's seed comes from a digest of the evictor's own file: it
changes with every edit, so a file cannot be fitted to it by looking at it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from lessons.l20_agents.agents import Load
from lessons.l20_agents.compare import BELADY, POLICIES, Maker, percentile
from lessons.l20_agents.guarded import Guarded, is_whole, load_evictor
from lessons.l20_agents.replay import Outcome, Replay
from mini_engine.base.errors import UserError
from mini_engine.kv.eviction import EvictionPolicy

LOAD, POOL = Load(agents=12, sessions=2), 2_048
FAMILY = b"lesson 20, kept back"  # so that no seed of a day gives the other load
YOURS = "yours"
COMPARED = ("LRU", "SLRU", "TLRU", "sessions", BELADY)
Row = dict[str, Any]


@dataclass(frozen=True)
class Score:
    """The rows of a contest, and the two seeds."""

    seed: int
    kept_back: int
    rows: list[Row]


def seed_of(source: bytes) -> int:
    """Return the seed of the load that is kept back from this file."""
    return int.from_bytes(sha256(FAMILY + source).digest()[:8], "big")


def contest(path: Path | None, seed: int, watch: Callable[[list[str]], Iterator[str]] = iter) -> Score:
    """Replay both loads with each policy. Without a file, only the course's take part.

    Args:
        watch: iterates over the names of the policies, and may show how far it is.

    Raises:
        UserError: the evictor made a mistake; the sentence names its line.
    """
    makers: dict[str, Maker] = {name: POLICIES[name] for name in COMPARED}
    source = b""
    if path is not None:
        evictor, source = load_evictor(path), path.read_bytes()
        makers = {YOURS: lambda replay: guarded(evictor, path, replay)} | makers
    kept_back = seed_of(source)
    loads = {"day": LOAD.generate(seed), "kept back": LOAD.generate(kept_back)}
    found: dict[str, dict[str, Outcome]] = {name: {} for name in loads}
    for name in watch(list(makers)):
        for load, trace in loads.items():
            found[load][name] = checked(Replay(trace, makers[name], POOL), path)
    return Score(seed, kept_back, [row_of(name, found) for name in makers])


def guarded(evictor: type[EvictionPolicy], path: Path, replay: Replay) -> Guarded:
    return Guarded(evictor, path, replay.num_blocks, lambda: replay.now)


def checked(replay: Replay, path: Path | None) -> Outcome:
    """Run a replay. Raises UserError if an evictor made a mistake."""
    policy = replay.tree.policy
    if isinstance(policy, Guarded):
        policy.tree = replay.tree
    outcome = replay.run()
    if isinstance(policy, Guarded) and policy.mistake:
        raise UserError(policy.mistake)
    if not is_whole(replay.tree):
        raise UserError(f"{path} has changed the tree; an evictor ranks nodes, and leaves them as they are")
    return outcome


def row_of(name: str, found: dict[str, dict[str, Outcome]]) -> Row:
    """Return a policy's row: hits in percent of all blocks, shares of Belady's hits, seconds to the first token."""
    row: Row = {"policy": name}
    for load, outcomes in found.items():
        outcome, best = outcomes[name], outcomes[BELADY]
        row[f"{load}: hits %"] = 100 * outcome.hit_rate()
        row[f"{load}: of Belady's %"] = 100 * outcome.num_found() / best.num_found()
        row[f"{load}: first token p99 s"] = percentile(outcome.waits(), 99)
    return row
