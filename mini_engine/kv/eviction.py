"""Lesson 8. Chooses which cached prefix to evict next: a policy with one method, and a lazily updated heap.

The heap holds unlocked leaves. Finding a prefix changes its rank but not its entry in the heap. Ranks never decrease,
so a stale entry reaches the top too early, never too late, and is then pushed again with its current rank. A lookup
therefore costs nothing here, and an eviction O(log n).
"""

from heapq import heappop, heappush
from itertools import count
from typing import Generic, Protocol, TypeVar


class Leaf(Protocol):
    """A node as a policy and the heap see it. Times are ticks of the tree's own counter.

    created: when its tokens were inserted. last_used: when they were last found or inserted.
    num_hits: how often they were found.
    is_evictable: the node is in the tree, has no children and is not locked.
    queued: it has an entry in the heap.
    """

    created: int
    last_used: int
    num_hits: int
    queued: bool

    @property
    def is_evictable(self) -> bool: ...


class EvictionPolicy:
    """The order in which leaves are evicted: here LRU, the default."""

    def rank(self, leaf: Leaf) -> tuple[int, ...]:
        """Return a sort key; the smallest is evicted first. It may increase during the leaf's life, never decrease."""
        return (leaf.last_used,)


class LRU(EvictionPolicy):
    """Least recently used: evict the prefix that has gone unused the longest."""


class LFU(EvictionPolicy):
    """Least frequently used: evict the prefix found least often; among equals, the least recently used."""

    def rank(self, leaf: Leaf) -> tuple[int, ...]:
        """See `EvictionPolicy.rank`."""
        return (leaf.num_hits, leaf.last_used)


class FIFO(EvictionPolicy):
    """First in, first out: evict the oldest prefix, used since or not."""

    def rank(self, leaf: Leaf) -> tuple[int, ...]:
        """See `EvictionPolicy.rank`."""
        return (leaf.created,)


LeafT = TypeVar("LeafT", bound=Leaf)
POLICIES = {"lru": LRU, "lfu": LFU, "fifo": FIFO}


class EvictionQueue(Generic[LeafT]):
    """A heap of leaves by rank, each at most once. Leaves no longer evictable are dropped when they reach the top."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.heap: list[tuple[tuple[int, ...], int, LeafT]] = []
        self.ties = count()

    def add(self, leaf: LeafT) -> None:
        """Queue a leaf for eviction, unless it is queued already or not evictable; O(log n)."""
        if leaf.is_evictable and not leaf.queued:
            leaf.queued = True
            heappush(self.heap, (self.policy.rank(leaf), next(self.ties), leaf))

    def pop(self) -> LeafT | None:
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
