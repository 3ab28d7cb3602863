"""Lesson 15. Several memories as one, for a model that needs all of them: states and windows, for example.

A request can begin only after a prefix that every memory can resume from. Each one shortens what the others accept,
until none does: a fixed point.

    cached prefix      ── 0 ────── 16 ────── 32 ────── 48 ──
    states             ·           ●                   ●         checkpoints after 16 and 48 tokens
    windows            ·           ●         ●                   complete after 16 and 32 tokens
    after 48?          states: 48 → windows: 32 → states: 16 → windows: 16 → states: 16, and none shortens it any more
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from mini_engine.kv.memory import CacheMemory, Lookup
from mini_engine.kv.radix_node import TOKEN_BYTES
from mini_engine.kv.request_table import RequestTable


def combined(method: Callable[..., Any], combine: Callable[[list[Any]], Any]) -> Any:
    """Return a method of Memories that calls this one of each memory, and combines the results."""
    name = method.__name__

    def of_all(self: "Memories", *arguments: Any) -> Any:
        return combine([getattr(memory, name)(*arguments) for memory in self.memories])

    return of_all


def nothing(results: list[None]) -> None:
    """Combine the results of methods that have none."""


class Memories(CacheMemory):
    """Asks each of several memories in turn. The methods are those of CacheMemory.

    Args:
        memories: the one that keeps the fewest places first: on the way there a request passes those of the others.
    """

    begins_everywhere = False

    def __init__(self, memories: Sequence[CacheMemory]) -> None:
        self.memories = memories

    most = combined(CacheMemory.most, sum)
    cost = combined(CacheMemory.cost, sum)
    num_reserved = combined(CacheMemory.num_reserved, sum)
    num_missing = combined(CacheMemory.num_missing, sum)
    num_evictable_after = combined(CacheMemory.num_evictable_after, sum)
    grow = combined(CacheMemory.grow, nothing)
    begin = combined(CacheMemory.begin, nothing)
    expect = combined(CacheMemory.expect, nothing)
    resume = combined(CacheMemory.resume, nothing)
    commit = combined(CacheMemory.commit, any)  # one of them is worth keeping: then `keep` keeps all
    keep = combined(CacheMemory.keep, nothing)
    settle = combined(CacheMemory.settle, nothing)
    announce_drafts = combined(CacheMemory.announce_drafts, nothing)
    truncate = combined(CacheMemory.truncate, nothing)  # none can forget a computed token: the first refuses for all
    drop = combined(CacheMemory.drop, nothing)
    shorten = combined(CacheMemory.shorten, max)

    @property
    def has_room(self) -> bool:
        """True if all have room for one more request."""
        return all(memory.has_room for memory in self.memories)

    @property
    def num_evictable(self) -> int:
        """The sum of the blocks that only the tree holds."""
        return sum(memory.num_evictable for memory in self.memories)

    @property
    def blocks_each(self) -> int:
        """Blocks that go with one of the tree's own, itself included."""
        return 1 + sum(memory.blocks_each - 1 for memory in self.memories)

    def chunk_end(self, request_id: str, start: int, stop: int) -> int:
        """Return the first end that one of them asks for."""
        for memory in self.memories:
            stop = memory.chunk_end(request_id, start, stop)
        return stop

    def free(self, request_id: str) -> None:
        """Release the request's share of each of them, whatever another one raises."""
        with ExitStack() as stack:
            for memory in self.memories:
                stack.callback(memory.free, request_id)

    def last(self, tree: Lookup, key: bytes, namespace: Hashable) -> int:
        """Return the longest part of `key`, in tokens, after which all of them can begin."""
        end, before = len(key) // TOKEN_BYTES, -1
        while end != before:
            before = end
            for memory in self.memories:
                end = memory.last(tree, key[: end * TOKEN_BYTES], namespace)
        return end

    def coming(self, request_id: str, table: RequestTable, num_found: int) -> Iterable[int]:
        """Return the places of the first, which are the fewest."""
        return self.memories[0].coming(request_id, table, num_found)

    def trim(self, num_blocks: int) -> None:
        """Free `num_blocks` of the blocks that can go first."""
        self._free_by("trim", num_blocks)

    def evict(self, num_blocks: int) -> None:
        """Free `num_blocks` of the others."""
        self._free_by("evict", num_blocks)

    def _free_by(self, method: str, num_blocks: int) -> None:
        """Have each memory free by this method what those before it have not."""
        for memory in self.memories:
            before = memory.num_evictable
            getattr(memory, method)(num_blocks)
            num_blocks -= before - memory.num_evictable
