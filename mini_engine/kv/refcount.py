"""Lesson 8. Reference-counted blocks: each block's count is the number of its holders, tables or the tree.

A block is free exactly when its count is 0. Block tables work unchanged: they allocate and free as before, but `free`
now means "I no longer hold it".
"""

from collections.abc import Collection
from threading import Lock

from mini_engine.kv.allocator import BlockAllocator


class RefCountedAllocator(BlockAllocator):
    """Lesson 2's free list for blocks with several holders. Thread-safe.

    Attributes:
        counts: the number of holders of each block of the pool.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, reserved: int = 1) -> None:
        super().__init__(num_blocks, block_size, reserved)
        self.counts = [0] * num_blocks
        self.mutex = Lock()

    def alloc_blocks(self, n: int) -> list[int]:
        """Return n free blocks, each with a count of 1; errors as in lesson 2."""
        with self.mutex:
            blocks = super().alloc_blocks(n)
            for block in blocks:
                self.counts[block] = 1
        return blocks

    def share(self, blocks: Collection[int]) -> None:
        """Add a holder to each of `blocks`.

        Raises:
            ValueError: a block is not held, so there is nothing to share. Nothing was changed.
        """
        with self.mutex:
            if not self.held.issuperset(blocks):
                raise ValueError(
                    f"blocks {sorted(set(blocks) - self.held)} are not held; only held blocks can be shared"
                )
            for block in blocks:
                self.counts[block] += 1

    def free(self, blocks: Collection[int]) -> None:
        """Remove a holder from each of `blocks`; those without holders become free. One call is atomic, like `share`.

        Raises:
            ValueError: a block is named twice or is not held (already freed, or never allocated). Nothing was changed.
        """
        with self.mutex:
            if len(set(blocks)) != len(blocks):
                raise ValueError(f"a block is named twice in {list(blocks)}; each holder frees a block once")
            if not self.held.issuperset(blocks):
                raise ValueError(
                    f"blocks {sorted(set(blocks) - self.held)} are not held; they were already freed or never allocated"
                )
            for block in blocks:
                self.counts[block] -= 1
            super().free([block for block in blocks if self.counts[block] == 0])
