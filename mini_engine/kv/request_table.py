"""Lesson 5. The blocks that a request holds: lesson 3's table, kept as a row for the kernels too."""

from array import array
from collections.abc import Sequence
from typing import Any

from mini_engine.kv.allocator import BlockAllocator


class RequestTable:
    """The blocks of one request, in the order of its tokens. The first `num_tokens` of their slots are in use.

    Attributes:
        row: the same blocks as int32, so that building a step's table is a memory copy.
        shared: a prefix cache's note of what the request shares with others; None where nothing is cached.
    """

    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self.blocks: list[int] = []
        self.row = array("i")
        self.num_tokens = 0
        self.shared: Any = None

    @property
    def num_slots(self) -> int:
        """Slots held, used or not."""
        return len(self.blocks) * self.allocator.block_size

    def append(self, count: int) -> None:
        """Add room for `count` more tokens, allocating blocks as needed.

        Raises:
            OutOfBlocks: the pool has fewer free blocks than are missing; nothing was changed.
        """
        missing = -(-(self.num_tokens + count) // self.allocator.block_size) - len(self.blocks)
        if missing > 0:
            self._extend(self.allocator.alloc_blocks(missing))
        self.num_tokens += count

    def adopt(self, blocks: Sequence[int], num_tokens: int) -> None:
        """Begin the table with blocks that others hold as well; the allocator has counted this table already."""
        self._extend(blocks)
        self.num_tokens = num_tokens

    def replace(self, indices: Sequence[int], blocks: Sequence[int]) -> None:
        """Put `blocks`, which this table holds already, at `indices`; free the blocks they replace."""
        old = [self.blocks[index] for index in indices]
        for index, block in zip(indices, blocks, strict=True):
            self.blocks[index] = self.row[index] = block
        self.allocator.free(old)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens and free the blocks that hold none of them.

        Raises:
            ValueError: `num_tokens` is negative or more than the table holds; nothing was changed.
        """
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"cannot keep {num_tokens} tokens of {self.num_tokens}")
        keep = -(-num_tokens // self.allocator.block_size)
        self.allocator.free(self.blocks[keep:])
        del self.blocks[keep:], self.row[keep:]
        self.num_tokens = num_tokens

    def free(self) -> None:
        """Free every block."""
        self.truncate(0)

    def _extend(self, blocks: Sequence[int]) -> None:
        self.blocks += blocks
        self.row.extend(blocks)
