"""Lesson 8. Chooses which cached prefix to evict next: a policy with one method, and a lazily updated heap.

The heap holds unlocked leaves. Finding a prefix changes its rank but not its entry in the heap. Ranks never decrease,
so a stale entry reaches the top too early, never too late, and is then pushed again with its current rank. A lookup
therefore costs nothing here, and an eviction O(log n).
"""

from heapq import heappop, heappush
from itertools import count

from mini_engine.kv.radix_node import Node


class EvictionPolicy:
    """The order in which leaves are evicted: here LRU, the default."""

    def rank(self, leaf: Node) -> tuple[int, ...]:
        """Return a sort key; the smallest is evicted first. It may increase during the leaf's life, never decrease."""
        return (leaf.last_used,)


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
    """A heap of leaves by rank, each at most once. Leaves no longer evictable are dropped when they reach the top."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.heap: list[tuple[tuple[int, ...], int, Node]] = []
        self.ties = count()

    def add(self, leaf: Node) -> None:
        """Queue a leaf for eviction, unless it is queued already or not evictable; O(log n)."""
        if leaf.is_evictable and not leaf.queued:
            leaf.queued = True
            heappush(self.heap, (self.policy.rank(leaf), next(self.ties), leaf))

    def pop(self) -> Node | None:
        """Remove and return the evictable leaf with the smallest rank, or None. O(log n) per entry popped."""
        while self.heap:
            rank, _, leaf = heappop(self.heap)
            leaf.queued = False
            if not leaf.is_evictable:
                continue
            if rank == self.policy.rank(leaf):
                return leaf
            self.add(leaf)
        return None
