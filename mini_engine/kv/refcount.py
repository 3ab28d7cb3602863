"""Lesson 8. Blocks with a count: how many tables and trees hold each. A block is free exactly when its count is 0.

A block table needs no change for it. It allocates and frees as before; what `free` now means is "I no longer hold it".
"""

from collections.abc import Collection
from threading import Lock

from mini_engine.kv.allocator import BlockAllocator


class RefCountedAllocator(BlockAllocator):
    """Lesson 2's free list, for blocks that several hold. Safe to call from several threads.

    Attributes:
        counts: for each block of the pool, how many hold it.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, reserved: int = 1) -> None:
        super().__init__(num_blocks, block_size, reserved)
        self.counts = [0] * num_blocks
        self.mutex = Lock()

    def alloc_blocks(self, n: int) -> list[int]:
        """Hand out n free blocks, each with a count of 1; errors as in lesson 2."""
        with self.mutex:
            blocks = super().alloc_blocks(n)
            for block in blocks:
                self.counts[block] = 1
        return blocks

    def share(self, blocks: Collection[int]) -> None:
        """One more holds each of `blocks`.

        Raises:
            ValueError: one of them is held by nobody, so that there is nothing to share. Nothing was changed.
        """
        with self.mutex:
            if not self.held.issuperset(blocks):
                raise ValueError(
                    f"blocks {sorted(set(blocks) - self.held)} are held by nobody; only held ones are shared"
                )
            for block in blocks:
                self.counts[block] += 1

    def free(self, blocks: Collection[int]) -> None:
        """One holder less for each of `blocks`; those that nobody holds any more are free.

        Raises:
            ValueError: a block is named twice or is not held. Nothing was changed.
        """
        with self.mutex:
            if len(set(blocks)) != len(blocks):
                raise ValueError(f"a block is named twice in {list(blocks)}; a holder lets go of a block once")
            if not self.held.issuperset(blocks):
                raise ValueError(
                    f"blocks {sorted(set(blocks) - self.held)} are not held; they were freed or never given"
                )
            for block in blocks:
                self.counts[block] -= 1
            super().free([block for block in blocks if self.counts[block] == 0])
