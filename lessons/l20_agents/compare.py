"""Lesson 20. The policies that are compared, each made for a replay, and the row of figures of one."""

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

from lessons.l20_agents.belady import belady
from lessons.l20_agents.replay import Outcome, Replay
from lessons.l20_agents.traces import Trace
from mini_engine.agents.policies import SLRU, TLRU
from mini_engine.agents.session import Limits
from mini_engine.agents.sessions import Sessions
from mini_engine.kv.eviction import LRU, EvictionPolicy

Maker = Callable[[Replay], EvictionPolicy]
Row = dict[str, Any]
BELADY = "Belady"
TLRU_TOKENS = 16_384, 4_096  # that a turn may compute without being late, and that it is expected to add


def tlru(replay: Replay) -> TLRU:
    """Return TLRU for a replay's blocks."""
    budget, adds = (tokens // replay.rates.block for tokens in TLRU_TOKENS)
    return TLRU(budget, adds)


def sessions(replay: Replay, policy: EvictionPolicy | None = None) -> Sessions:
    """Return sessions with the engine's limits for a pool of this size, and the replay's clock."""
    return Sessions(Limits.of_pool(replay.num_blocks), policy, lambda: replay.now)


POLICIES: Mapping[str, Maker] = {
    "LRU": lambda replay: LRU(),
    "SLRU": lambda replay: SLRU(),
    "TLRU": tlru,
    "sessions": sessions,
    "sessions, SLRU": lambda replay: sessions(replay, SLRU()),
    BELADY: belady,
}


def outcomes(trace: Trace, num_blocks: int, policies: Mapping[str, Maker] = POLICIES) -> dict[str, Outcome]:
    """Replay a trace with each policy."""
    return {name: Replay(trace, make, num_blocks).run() for name, make in policies.items()}


def percentile(values: list[float], part: float) -> float:
    """Return the smallest of the values that at least `part` percent of them do not exceed."""
    return sorted(values)[max(0, ceil(len(values) * part / 100) - 1)]


def row_of(outcome: Outcome, best: Outcome, group: str | None = "agents") -> Row:
    """Return hits in percent, their share of the best policy's, and times to the first token, of a group of calls."""
    waits = outcome.waits(group)
    return {
        "hits %": 100 * outcome.hit_rate(group),
        "of Belady's %": 100 * outcome.num_found(group) / max(1, best.num_found(group)),
        "first token p50 s": percentile(waits, 50),
        "p99 s": percentile(waits, 99),
    }
