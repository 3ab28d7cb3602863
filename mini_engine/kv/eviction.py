"""Lesson 8. Chooses which cached prefix to evict next: a policy ranks leaves, and a lazily updated heap sorts them.

The heap holds unlocked leaves. Finding a prefix raises its rank but does not touch its entry in the heap: a stale entry
reaches the top too early, never too late, and is then pushed again with its current rank. A lookup therefore costs
nothing here, and an eviction O(log n). A policy whose ranks can fall, too, reports those leaves (`fallen`).
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from types import MappingProxyType

from mini_engine.kv.prefixes import SharedPrefix
from mini_engine.kv.radix_node import Node


class EvictionPolicy:
    """The order in which leaves are evicted: here LRU, the default.

    `rank` is all that the policies of lesson 8 need. Those of lesson 20 know more than when a prefix was used last; the
    other methods tell them, and do nothing here.
    """

    @property
    def counts(self) -> Mapping[str, int]:
        """What it counts, by a metric's name. Read from other threads."""
        return MappingProxyType({})

    def rank(self, leaf: Node) -> tuple[int, ...]:
        """Return a sort key; the smallest is evicted first. If it can decrease, `fallen` must report the leaf."""
        return (leaf.last_used,)

    def num_ready(self, leaf: Node) -> int:
        """Return how many blocks may go, from the leaf's end, before it is ranked again: 1 or more."""
        return len(leaf.blocks)

    def fallen(self) -> Iterable[Node]:
        """Return the leaves whose ranks have decreased since the last call. Asked before each eviction."""
        return ()

    def waits(self, session: Hashable, namespace: Hashable) -> None:
        """Note that a request of this session has come, and waits to be admitted."""

    def gave_up(self, session: Hashable, namespace: Hashable) -> None:
        """Note that a request of this session has ended without being admitted."""

    def began(self, prefix: SharedPrefix) -> None:
        """Note that a request begins with this prefix, which it has locked."""

    def ended(self, prefix: SharedPrefix) -> None:
        """Note that a request ends, and that its text is stored up to `prefix.node`, which it still locks."""

    def lost(self, leaf: Node, blocks: Sequence[int]) -> None:
        """Note that a leaf is about to lose these blocks from its end; if they are all it has, it leaves the tree."""

    def waiting(self) -> Sequence[Node]:
        """Return where texts end whose next turn is expected, in the order in which they give way.

        What a memory keeps for them beside K and V should go in this order too, and last.
        """
        return ()

    def close(self, session: Hashable, namespace: Hashable) -> bool:
        """Forget a session. Return False if it is unknown."""
        return False


class LRU(EvictionPolicy):
    """Least recently used: evict the prefix that has gone unused the longest."""


class LFU(EvictionPolicy):
    """Least frequently used: evict the prefix found least often; among equals, the least recently used."""

    def rank(self, leaf: Node) -> tuple[int, ...]:
        """See `EvictionPolicy.rank`."""
        return (leaf.num_hits, leaf.last_used)


class FIFO(EvictionPolicy):
    """First in, first out: evict the oldest prefix, used since or not."""

    def rank(self, leaf: Node) -> tuple[int, ...]:
        """See `EvictionPolicy.rank`."""
        return (leaf.created,)


POLICIES = {"lru": LRU, "lfu": LFU, "fifo": FIFO}


class EvictionQueue:
    """A heap of leaves by rank. `leaf.queued` is the rank of the one entry that counts; others are dropped at the top.

    So are leaves that are no longer evictable.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.heap: list[tuple[tuple[int, ...], int, Node]] = []
        self.ties = count()

    def add(self, leaf: Node) -> None:
        """Queue a leaf for eviction, unless it is not evictable or has an entry that is early enough; O(log n)."""
        if leaf.is_evictable and (leaf.queued is None or self.policy.rank(leaf) < leaf.queued):
            leaf.queued = self.policy.rank(leaf)
            heappush(self.heap, (leaf.queued, next(self.ties), leaf))

    def pop(self) -> Node | None:
        """Remove and return the evictable leaf with the smallest rank, or None. O(log n) per entry popped."""
        for leaf in self.policy.fallen():
            self.add(leaf)
        while self.heap:
            rank, _, leaf = heappop(self.heap)
            if rank != leaf.queued:
                continue
            leaf.queued = None
            if not leaf.is_evictable:
                continue
            if rank == self.policy.rank(leaf):
                return leaf
            self.add(leaf)
        return None
