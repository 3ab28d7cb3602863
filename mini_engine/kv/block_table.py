"""Lesson 3. Block tables: which blocks hold a sequence's tokens, in order, and how much of what is held is in use.

Numbers only, as in lesson 2's allocator: the tensors that a kernel walks are made from these tables by `block_tensor`.
"""

from collections.abc import Sequence

from mini_engine.kv.allocator import BlockAllocator

NULL_BLOCK = 0  # the block that the allocator reserves: padding points at it


class BlockTable:
    """Which blocks hold one sequence's tokens, in order. `num_tokens` of its slots are in use."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self.blocks: list[int] = []
        self.num_tokens = 0

    @property
    def num_slots(self) -> int:
        """Slots held, used or not."""
        return len(self.blocks) * self.allocator.block_size

    def append(self, count: int) -> None:
        """Make room for `count` more tokens.

        Raises:
            OutOfBlocks: the pool cannot give the missing blocks; nothing was changed.
            ValueError: count is negative.
        """
        if count < 0:
            raise ValueError(f"cannot append {count} tokens; use truncate to take tokens away")
        missing = -(-(self.num_tokens + count) // self.allocator.block_size) - len(self.blocks)
        self.blocks += self.allocator.alloc_blocks(max(0, missing))
        self.num_tokens += count

    def lookup(self, position: int) -> tuple[int, int]:
        """(block id, offset in it) of the token at `position`; IndexError outside 0 … num_tokens - 1."""
        if not 0 <= position < self.num_tokens:
            raise IndexError(f"position {position} is outside 0 … {self.num_tokens - 1}")
        index, offset = divmod(position, self.allocator.block_size)
        return self.blocks[index], offset

    def slots(self, start: int, stop: int) -> list[int]:
        """Flat slots of the tokens start … stop - 1: `block_id * block_size + offset` each."""
        size = self.allocator.block_size
        return [block * size + offset for block, offset in map(self.lookup, range(start, stop))]

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens and give back the blocks that hold none of them.

        Raises:
            ValueError: num_tokens is negative or more than there are; nothing was changed.
        """
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"cannot keep {num_tokens} tokens of {self.num_tokens}")
        keep = -(-num_tokens // self.allocator.block_size)
        self.allocator.free(self.blocks[keep:])
        del self.blocks[keep:]
        self.num_tokens = num_tokens

    def free(self) -> None:
        """Give everything back. The table is empty then, and can be used again."""
        self.truncate(0)


def fragmentation_ratio(tables: Sequence[BlockTable]) -> float:
    """Partly filled blocks / allocated blocks; 0 where nothing is allocated."""
    allocated = sum(len(table.blocks) for table in tables)
    partly = sum(table.num_tokens % table.allocator.block_size != 0 for table in tables)
    return partly / allocated if allocated else 0.0


def waste_ratio(tables: Sequence[BlockTable]) -> float:
    """Unused slots / allocated slots; 0 where nothing is allocated."""
    slots = sum(table.num_slots for table in tables)
    used = sum(table.num_tokens for table in tables)
    return (slots - used) / slots if slots else 0.0
