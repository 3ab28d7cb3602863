"""Lesson 2. The block allocator: keeps track of which blocks of a pool are free and which are held.

Numbers only: this module decides which blocks a request gets, the pool holds the tensors, and deciding needs no torch.
"""

from collections.abc import Collection

from mini_engine.errors import OutOfBlocks, UserError


class BlockAllocator:
    """The free list: blocks of the pool that are not held. The last block returned is the first handed out.

    Args:
        num_blocks: blocks of the pool; their ids are 0 … num_blocks - 1.
        block_size: slots in a block.
        reserved: how many of the first blocks are never handed out. 0 in lesson 2; from lesson 3 on 1, the null block.

    Raises:
        UserError: a pool needs at least one block and one slot in it, and cannot reserve more blocks than it has.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, reserved: int = 1) -> None:
        if num_blocks < 1 or block_size < 1 or not 0 <= reserved <= num_blocks:
            raise UserError(
                f"{num_blocks} blocks of {block_size} slots, {reserved} blocks reserved, are no pool; "
                "give at least 1 block and 1 slot, and reserve no more blocks than there are"
            )
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.free_blocks = list(range(reserved, num_blocks))[::-1]  # handed out from the end: low ids first
        self.held: set[int] = set()

    @classmethod
    def for_slots(cls, num_slots: int, block_size: int = 16) -> "BlockAllocator":
        """Return an allocator for lesson 2's pool of `num_slots` slots; it hands out every block, block 0 included.

        Raises:
            UserError: the slots do not make a whole number of blocks, at least one.
        """
        if block_size < 1 or num_slots < block_size or num_slots % block_size:
            raise UserError(
                f"{num_slots} slots cannot be cut into blocks of {block_size}; "
                "give a block size of at least 1 and a multiple of it as slots"
            )
        return cls(num_slots // block_size, block_size, reserved=0)

    @property
    def num_free(self) -> int:
        """Blocks that can still be handed out."""
        return len(self.free_blocks)

    def alloc_blocks(self, n: int) -> list[int]:
        """Hand out n block ids; `[]` for 0.

        Raises:
            OutOfBlocks: fewer than n are free; nothing was changed.
            ValueError: n is negative.
        """
        if n < 0:
            raise ValueError(f"{n} blocks were asked for; ask for 0 or more")
        if n > len(self.free_blocks):
            raise OutOfBlocks(f"need {n} blocks, {len(self.free_blocks)} free of {self.num_blocks}")
        cut = len(self.free_blocks) - n
        blocks = self.free_blocks[cut:][::-1]
        del self.free_blocks[cut:]
        self.held.update(blocks)
        return blocks

    def free(self, blocks: Collection[int]) -> None:
        """Take blocks back.

        Raises:
            ValueError: a block is named twice or is not held: freed before, or never given. Nothing was changed.
        """
        returned = set(blocks)
        if len(returned) != len(blocks):
            raise ValueError(f"a block is named twice in {list(blocks)}; each can be freed once")
        if not returned <= self.held:
            raise ValueError(
                f"blocks {sorted(returned - self.held)} are not held; they were freed before or never given"
            )
        self.held -= returned
        self.free_blocks.extend(blocks)
