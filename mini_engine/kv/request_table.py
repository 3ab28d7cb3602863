"""Lesson 5. The blocks that a request holds: lesson 3's table, kept as a row for the kernels too."""

from array import array
from collections.abc import Sequence
from typing import Any

from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.block_table import BlockTable


class RequestTable(BlockTable):
    """The blocks of one request, in the order of its tokens. Methods not overridden here behave as in lesson 3.

    Attributes:
        row: the same blocks as int32, so that building a step's table is a memory copy.
        shared: a prefix cache's note of what the request shares with others; None where nothing is cached.
    """

    def __init__(self, allocator: BlockAllocator) -> None:
        super().__init__(allocator)
        self.row = array("i")
        self.shared: Any = None

    def append(self, count: int) -> None:
        """Add room for `count` more tokens; errors as in lesson 3."""
        super().append(count)
        self.row.extend(self.blocks[len(self.row) :])

    def adopt(self, blocks: Sequence[int], num_tokens: int) -> None:
        """Begin the table with blocks that others hold as well; the allocator has counted this table already."""
        self.blocks += blocks
        self.row.extend(blocks)
        self.num_tokens = num_tokens

    def replace(self, indices: Sequence[int], blocks: Sequence[int]) -> None:
        """Put `blocks`, which this table holds already, at `indices`; free the blocks they replace."""
        old = [self.blocks[index] for index in indices]
        for index, block in zip(indices, blocks, strict=True):
            self.blocks[index] = self.row[index] = block
        self.allocator.free(old)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens; errors as in lesson 3."""
        super().truncate(num_tokens)
        del self.row[len(self.blocks) :]
