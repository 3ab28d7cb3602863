"""Lesson 20. Part `cost` of the suite `agents`: the processor's time for evicting a block, by policy, on the real tree.

One call fills a pool with the texts of sessions and then lets a crowd pass through it: each question evicts as many
blocks as it needs. The policies take turns, in processor time. What is timed is all that a request costs in the
manager; the difference to LRU is the policy's.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import process_time

from scripts.bench.turns import gather_turns

from mini_engine.agents.policies import SLRU, TLRU
from mini_engine.agents.session import Limits
from mini_engine.agents.sessions import Sessions
from mini_engine.kv.cache_coordinator import caching_manager
from mini_engine.kv.eviction import LRU, EvictionPolicy
from mini_engine.kv.manager import KvCacheManager

POOL, BLOCK, TALKS, QUESTIONS, SIZE = 20_000, 16, 400, 400, 40  # blocks; tokens; sessions; requests; blocks in a text
POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "LRU": LRU,
    "SLRU": SLRU,
    "TLRU": lambda: TLRU(8, 2),
    "sessions": lambda: Sessions(Limits.of_pool(POOL)),
    "sessions, SLRU": lambda: Sessions(Limits.of_pool(POOL), SLRU()),
}


@dataclass(eq=False)
class Asked:
    """A request as the coordinator sees it."""

    id: str
    token_ids: list[int]
    session: str | None = None
    namespace: str | None = None


def cost(args: Namespace) -> tuple[list[dict], str]:
    """Return microseconds a block, medians of rounds in turns."""
    rounds = args.rounds or (3 if args.quick else 9)
    timings = gather_turns({name: partial(passing, make) for name, make in POLICIES.items()}, rounds, "policies")
    num_blocks = QUESTIONS * SIZE
    base = timings["LRU"].median
    rows = [
        {"policy": name, "µs a block": 1e6 * timing.median / num_blocks}
        | {"± %": 100 * timing.spread, "more than LRU": 1e6 * (median(timing.seconds) - base) / num_blocks}
        for name, timing in timings.items()
    ]
    said = f"{TALKS} sessions in {POOL:,} blocks of {BLOCK} tokens; {QUESTIONS} questions evict {SIZE} blocks each"
    return rows, said


def passing(make: Callable[[], EvictionPolicy]) -> float:
    """Return the seconds in which a crowd passes through a full pool."""
    manager = caching_manager(POOL + 1, BLOCK, policy=make())
    fill(manager)
    questions = [Asked(f"q{index}", text(10**6 + index)) for index in range(QUESTIONS)]
    begun = process_time()
    for question in questions:
        serve(manager, question)
    return process_time() - begun


def fill(manager: KvCacheManager) -> None:
    """Fill the pool: sessions with two turns each, and texts of no session."""
    for index in range(TALKS):
        ids = text(index)
        serve(manager, Asked(f"a{index}", ids, f"s{index}"))
        serve(manager, Asked(f"b{index}", [*ids, *ids[:BLOCK]], f"s{index}"))
    index = TALKS
    while manager.blocks_by_state.free >= SIZE:
        serve(manager, Asked(f"n{index}", text(index)))
        index += 1


def serve(manager: KvCacheManager, asked: Asked) -> None:
    """Run a request as the engine does."""
    manager.coordinator.request_added(asked)
    manager.allocate(asked.id, asked.token_ids)
    manager.grow(asked.id, len(asked.token_ids))
    manager.commit(asked.id, asked.token_ids, len(asked.token_ids))
    manager.free(asked.id, asked.token_ids)


def text(index: int) -> list[int]:
    """Return a text that shares no beginning with another one."""
    return [index + 1] * (SIZE * BLOCK)
