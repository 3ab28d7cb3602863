"""Lesson 15. The prefix tree's share of the window groups: a companion for some of its own blocks.

    tree, group 0         7   2   9   4   6   3   1         every token, as in lesson 8
    windows               ·   ·   ·  11  15   ·   8         W - 1 tokens fit in 2 blocks: a request can begin
                                          ↑                 behind 6, but not behind 3 or 1

A request that begins behind n tokens needs group 0 for all n, and the other groups for the last W - 1 of them. So most
companions can go, one by one, while the tree keeps its blocks (SGLang calls what is left a tombstone). Which ones go
before the tree gives up a block of its own, and which ones after that, decides what the cache is worth.

All of it is in numbers: a companion has the tree as one of its holders, and requests as others (lesson 8's counts).
"""

from collections.abc import Iterable, Sequence

from mini_engine.kv.refcount import RefCountedAllocator
from mini_engine.windows.window_table import first_visible

Companion = tuple[int, ...]  # a block of each window group


class KeptWindows:
    """The companions of a tree's blocks, found by the id of the tree's block.

    Args:
        allocator: of the pool that all groups share. window: W. num_groups: with windows.

    Attributes:
        companions: every one that the tree holds.
        proven: blocks in the window of a place: an end where a request has begun, or is expected to.
        spare, places: two queues of evictable companions, which nothing but the tree holds. Each of these is in one of
            them; the first of a queue goes first. `trim` and `evict` take from them.
    """

    def __init__(self, allocator: RefCountedAllocator, window: int, num_groups: int) -> None:
        self.allocator, self.window, self.num_groups = allocator, window, num_groups
        self.companions: dict[int, Companion] = {}
        self.proven: set[int] = set()
        self.spare: dict[int, None] = {}
        self.places: dict[int, None] = {}

    @property
    def num_evictable(self) -> int:
        """Blocks that only the tree holds."""
        return self.num_groups * (len(self.spare) + len(self.places))

    def first_block(self, num_tokens: int) -> int:
        """Return the index of the first block that is needed behind `num_tokens` tokens.

        The next token sees less: what counts is where another request may begin, the end of the last whole block. If
        the request ends here, the tree must find the window of that place.
        """
        size = self.allocator.block_size
        return first_visible(num_tokens // size * size, self.window) // size

    def num_usable(self, blocks: Sequence[int]) -> int:
        """Return how many of the tree's `blocks`, a stored prefix, a request can begin after.

        The most for which each block has a companion that the next token sees: those from `first_block` on. It is 0
        if there is no other. From right to left, as in vLLM: a block without one rules out every end that needs it, so
        none is looked at twice. Changes nothing.
        """
        num_blocks = index = len(blocks)
        while index > self.first_block(num_blocks * self.allocator.block_size):
            index -= 1
            if blocks[index] not in self.companions:
                num_blocks = index
        return num_blocks

    def evictable_in(self, blocks: Iterable[int]) -> int:
        """Return how many evictable blocks are companions of these."""
        return self.num_groups * sum(block in self.spare or block in self.places for block in blocks)

    def use(self, blocks: Sequence[int]) -> list[Companion]:
        """Return the companions of `blocks`, in order, for a request that begins with them.

        It holds them from now on, beside the tree and perhaps other requests (`allocator.share`), so none of them is
        evictable: neither in `spare` nor in `places`. That a request began here is a proof that others may: `proven`.
        """
        self.proven.update(blocks)
        for block in blocks:
            self.allocator.share(self.companions[block])
            self.spare.pop(block, None)
            self.places.pop(block, None)
        return [self.companions[block] for block in blocks]

    def prove(self, blocks: Iterable[int]) -> None:
        """Note that these blocks lie in the window of a place where requests begin, as far as they have companions.

        A companion that is evictable stays so, but may be worth more from now on than the other ones.
        """
        for block in blocks:
            if block in self.companions:
                self.proven.add(block)
                if block in self.spare:
                    del self.spare[block]
                    self.places[block] = None

    def keep(self, block: int, companion: Companion) -> None:
        """Give a block of the tree a companion that a request holds, unless it has one."""
        if block not in self.companions:
            self.allocator.share(companion)
            self.companions[block] = companion

    def release(self, block: int, companion: Companion) -> None:
        """Note that a request has just given up `companion`, which it held for `block` of the tree.

        It is evictable from now on if it is what the tree keeps for `block`, and nothing else holds it any more.
        """
        if self.companions.get(block) == companion and self.allocator.counts[companion[0]] == 1:
            (self.places if block in self.proven else self.spare)[block] = None

    def drop(self, block: int) -> None:
        """Forget the companion of a block that leaves the tree, or whose companion is evicted."""
        if companion := self.companions.pop(block, None):
            self.spare.pop(block, None)
            self.places.pop(block, None)
            self.proven.discard(block)
            self.allocator.free(companion)

    def trim(self, num_blocks: int) -> None:
        """Free `num_blocks` blocks before the tree gives up any of its own, or as many as are worth less than those.

        `_evict` drops companions, and so does the tree when it gives up a block of its own.
        """
        self._evict(self.spare, num_blocks)

    def evict(self, num_blocks: int) -> None:
        """Free `num_blocks` blocks when the tree has no leaf left to give up, or all that are evictable."""
        self._evict(self.places, num_blocks)

    def _evict(self, queue: dict[int, None], num_blocks: int) -> None:
        """Drop companions from the front of a queue until `num_blocks` blocks are free or it is empty."""
        for block in list(queue)[: max(0, -(-num_blocks // self.num_groups))]:
            self.drop(block)
