"""Lesson 2. The block allocator: keeps track of which blocks of a pool are free and which are held.

It works on plain numbers and does not import torch: it decides which blocks a request gets; the pool holds the tensors.
"""

from collections.abc import Collection

from mini_engine.base.errors import OutOfBlocks, UserError


class BlockAllocator:
    """The free list: the blocks of a pool that no request holds. The last block returned is the first handed out.

    Args:
        num_blocks: blocks in the pool, reserved ones included; their ids are 0 … num_blocks - 1.
        block_size: slots in a block.
        reserved: how many of the first blocks are never handed out: 0 in lesson 2, 1 (the null block) from lesson 3 on.

    Raises:
        UserError: the pool would have no block or no slot, or more blocks are reserved than it has.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, reserved: int = 1) -> None:
        if num_blocks < 1 or block_size < 1 or not 0 <= reserved <= num_blocks:
            raise UserError(
                f"{num_blocks} blocks of {block_size} slots, {reserved} blocks reserved, do not make a pool; "
                "use at least 1 block of at least 1 slot, and reserve no more blocks than there are"
            )
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.free_blocks = list(range(reserved, num_blocks))[::-1]  # handed out from the end: low ids first
        self.held: set[int] = set()

    @classmethod
    def for_slots(cls, num_slots: int, block_size: int = 16) -> "BlockAllocator":
        """Return an allocator for lesson 2's pool of `num_slots` slots. It hands out every block, block 0 included.

        Raises:
            UserError: `num_slots` is not a positive multiple of `block_size`.
        """
        if block_size < 1 or num_slots < block_size or num_slots % block_size:
            raise UserError(
                f"{num_slots} slots cannot be divided into blocks of {block_size}; "
                "use a block size of at least 1 and a number of slots that is a multiple of it"
            )
        return cls(num_slots // block_size, block_size, reserved=0)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self.free_blocks)

    @property
    def num_usable(self) -> int:
        """Blocks that requests can hold, all together: `num_blocks` without the reserved ones."""
        return len(self.free_blocks) + len(self.held)

    def alloc_blocks(self, n: int) -> list[int]:
        """Move n blocks from `free_blocks` to `held` and return their ids, `[]` for 0. The last ones freed come first.

        Raises:
            OutOfBlocks: fewer than n blocks are free; nothing was changed.
            ValueError: n is negative; nothing was changed.
        """
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks; the number must be 0 or more")
        if n > len(self.free_blocks):
            raise OutOfBlocks(f"need {n} blocks, {len(self.free_blocks)} free of {self.num_usable}")
        cut = len(self.free_blocks) - n
        blocks = self.free_blocks[cut:][::-1]
        del self.free_blocks[cut:]
        self.held.update(blocks)
        return blocks

    def free(self, blocks: Collection[int]) -> None:
        """Move blocks from `held` back to `free_blocks`; they are the next to be handed out.

        Raises:
            ValueError: a block is named twice, or is not held (already freed, or never allocated). Nothing was changed.
        """
        returned = set(blocks)
        if len(returned) != len(blocks):
            raise ValueError(f"a block is named twice in {list(blocks)}; free each block once")
        if not returned <= self.held:
            stray = sorted(returned - self.held)
            raise ValueError(f"blocks {stray} are not held; they were already freed or never allocated")
        self.held -= returned
        self.free_blocks.extend(blocks)
