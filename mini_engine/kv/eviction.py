"""Lesson 8. Which cached prefix goes first: a policy of one method, and a heap that may be out of date.

The heap holds leaves that nobody uses. Finding a prefix changes its rank, and its entry in the heap is left as it is: a
rank only ever grows, so an entry that is out of date comes up too early, never too late, and is put back then. So a
lookup costs nothing here, and an eviction O(log n).
"""

from heapq import heappop, heappush
from itertools import count
from typing import Generic, Protocol, TypeVar


class Leaf(Protocol):
    """What a policy and the heap know of a node of the tree. Times are numbers that the tree counts up.

    created: when its tokens came in. last_used: when they were last found or put in.
    num_hits: how often they were found.
    is_evictable: it is in the tree, nothing hangs below it and nobody has locked it.
    queued: it has an entry in the heap.
    """

    created: int
    last_used: int
    num_hits: int
    queued: bool

    @property
    def is_evictable(self) -> bool: ...


class LRU:
    """The prefix that was not used for the longest time."""

    def rank(self, leaf: Leaf) -> tuple[int, ...]:
        """What is smallest goes first. It may grow while the leaf lives, and must never fall."""
        return (leaf.last_used,)


class LFU:
    """The prefix that was found least often; of several, the one not used for the longest time."""

    def rank(self, leaf: Leaf) -> tuple[int, ...]:
        """As for LRU."""
        return (leaf.num_hits, leaf.last_used)


class FIFO:
    """The prefix that came first, used or not."""

    def rank(self, leaf: Leaf) -> tuple[int, ...]:
        """As for LRU."""
        return (leaf.created,)


EvictionPolicy = LRU | LFU | FIFO
LeafT = TypeVar("LeafT", bound=Leaf)
POLICIES = {"lru": LRU, "lfu": LFU, "fifo": FIFO}


class EvictionQueue(Generic[LeafT]):
    """Leaves by rank, each at most once. What is no longer evictable is dropped when it comes up."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.heap: list[tuple[tuple[int, ...], int, LeafT]] = []
        self.ties = count()

    def add(self, leaf: LeafT) -> None:
        """Let an evictable leaf wait for its end; O(log n)."""
        if leaf.is_evictable and not leaf.queued:
            leaf.queued = True
            heappush(self.heap, (self.policy.rank(leaf), next(self.ties), leaf))

    def pop(self) -> LeafT | None:
        """The evictable leaf with the smallest rank, taken out; None if there is none. O(log n) for each entry met."""
        while self.heap:
            rank, _, leaf = heappop(self.heap)
            leaf.queued = False
            if not leaf.is_evictable:
                continue
            if rank == self.policy.rank(leaf):
                return leaf
            self.add(leaf)
        return None
