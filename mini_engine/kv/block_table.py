"""Lesson 3. Block tables: which blocks hold a sequence's tokens, in order, and how many of their slots are in use.

Like lesson 2's allocator, this module works on plain numbers and does not import torch; `block_tensor` turns the tables
into the tensors that a kernel reads.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from mini_engine.kv.allocator import BlockAllocator

NULL_BLOCK = 0  # reserved by the allocator; padding points at it


class BlockTable:
    """The blocks of one sequence, in the order of its tokens. The first `num_tokens` of their slots are in use."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self.blocks: list[int] = []
        self.num_tokens = 0

    @property
    def num_slots(self) -> int:
        """Slots held, used or not."""
        return len(self.blocks) * self.allocator.block_size

    def append(self, count: int) -> None:
        """Add room for `count` more tokens, allocating blocks as needed.

        Raises:
            OutOfBlocks: the pool has fewer free blocks than are missing; nothing was changed.
            ValueError: count is negative; nothing was changed.
        """
        if count < 0:
            raise ValueError(f"cannot append {count} tokens; use truncate to remove tokens")
        missing = -(-(self.num_tokens + count) // self.allocator.block_size) - len(self.blocks)
        self.blocks += self.allocator.alloc_blocks(max(0, missing))
        self.num_tokens += count

    def lookup(self, position: int) -> tuple[int, int]:
        """Return (block id, offset within the block) of the token at `position`.

        Raises:
            IndexError: `position` is outside 0 … num_tokens - 1: negative, or a slot that no token is in yet.
        """
        if not 0 <= position < self.num_tokens:
            raise IndexError(f"position {position} is outside 0 … {self.num_tokens - 1}")
        index, offset = divmod(position, self.allocator.block_size)
        return self.blocks[index], offset

    def slots(self, start: int, stop: int) -> list[int]:
        """Return the flat slots of tokens start … stop - 1, each `block_id * block_size + offset`."""
        size = self.allocator.block_size
        return [block * size + offset for block, offset in map(self.lookup, range(start, stop))]

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens and free the blocks that hold none of them.

        Raises:
            ValueError: `num_tokens` is negative or more than the table holds; nothing was changed.
        """
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"cannot keep {num_tokens} tokens of {self.num_tokens}")
        keep = -(-num_tokens // self.allocator.block_size)
        self.allocator.free(self.blocks[keep:])
        del self.blocks[keep:]
        self.num_tokens = num_tokens

    def free(self) -> None:
        """Free every block. The table is empty afterwards and can be used again."""
        self.truncate(0)


class Filled(Protocol):
    """Blocks in the order of a sequence's tokens: a BlockTable, or lesson 5's RequestTable."""

    allocator: BlockAllocator
    blocks: Any
    num_tokens: int

    @property
    def num_slots(self) -> int: ...


def fragmentation_ratio(tables: Sequence[Filled]) -> float:
    """Return partly filled blocks / allocated blocks; 0 if nothing is allocated."""
    allocated = sum(len(table.blocks) for table in tables)
    partly = sum(table.num_tokens % table.allocator.block_size != 0 for table in tables)
    return partly / allocated if allocated else 0.0


def waste_ratio(tables: Sequence[Filled]) -> float:
    """Return unused slots / allocated slots; 0 if nothing is allocated."""
    slots = sum(table.num_slots for table in tables)
    used = sum(table.num_tokens for table in tables)
    return (slots - used) / slots if slots else 0.0
