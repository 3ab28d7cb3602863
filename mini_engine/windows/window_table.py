"""Lesson 15. A request's blocks in the window groups: tables with holes in place of blocks that no later token sees.

    tokens        0 …  3 | 4 …  7 | 8 … 11 | 12 … 15         block size 4, W = 6, 16 tokens computed
    full group         7        2        9        4
    window group       0        0        5        8          token 16 sees 11 … 16: the blocks before them are free

A hole is the null block. Positions do not change, so a kernel finds token i where it would without holes, and only has
to begin at the window.
"""

from array import array
from collections.abc import Sequence

from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.block_table import NULL_BLOCK


def first_visible(position: int, window: int) -> int:
    """Return the first token that a query at `position` sees."""
    return max(0, position - window + 1)


class WindowTable:
    """The blocks of one request in all window groups. The groups grow and slide together.

    Attributes:
        rows: for each group its blocks in the order of the tokens, int32, with the null block for holes.
        first: the number of leading holes; all later blocks are held.
    """

    def __init__(self, allocator: BlockAllocator, num_groups: int) -> None:
        self.allocator = allocator
        self.rows = [array("i") for _ in range(num_groups)]
        self.first = 0

    def __len__(self) -> int:
        """Return the number of blocks of one group, holes included."""
        return len(self.rows[0])

    @property
    def num_held(self) -> int:
        """The number of blocks held, in all groups."""
        return len(self.rows) * (len(self) - self.first)

    def at(self, index: int) -> tuple[int, ...]:
        """Return the blocks at `index`, one of each group."""
        return tuple(row[index] for row in self.rows)

    def adopt(self, first: int, blocks: Sequence[Sequence[int]]) -> None:
        """Start the table with `first` holes, followed by blocks that are allocated already.

        Args:
            blocks: for each index, a block of each group.
        """
        for group, row in enumerate(self.rows):
            row.extend([NULL_BLOCK] * first)
            row.extend(both[group] for both in blocks)
        self.first = first

    def num_missing(self, num_blocks: int, first: int) -> int:
        """Return the number of blocks that `grow` would allocate."""
        return len(self.rows) * max(0, num_blocks - max(len(self), first))

    def grow(self, num_blocks: int, first: int = 0) -> None:
        """Ensure that each group has at least `num_blocks` entries by appending blocks or holes.

        Existing entries do not change, and a table that is long enough stays as it is.

        Args:
            first: new entries before this index are holes: no block is allocated for them, and `self.first` becomes the
                first index after them. The caller ensures that no block is held before a new hole.

        Raises:
            OutOfBlocks: the pool has fewer free blocks than are missing in all groups together; nothing was changed.
        """
        blocks = self.allocator.alloc_blocks(self.num_missing(num_blocks, first))
        each = len(blocks) // len(self.rows)
        if (holes := num_blocks - len(self) - each) > 0:
            self.first = len(self) + holes
        for group, row in enumerate(self.rows):
            row.extend([NULL_BLOCK] * holes)
            row.extend(blocks[group * each : (group + 1) * each])

    def slide(self, first: int) -> list[tuple[int, tuple[int, ...]]]:
        """Free the blocks before index `first` that are still held, and leave a hole in place of each.

        Entries do not move, and the table does not grow: `first` may be beyond its end, or before `self.first`.

        Returns:
            for each index that became a hole, in order: (index, the blocks that were there, one of each group).
        """
        gone = [(index, self.at(index)) for index in range(self.first, min(first, len(self)))]
        for index, blocks in gone:
            self.allocator.free(blocks)
            for row in self.rows:
                row[index] = NULL_BLOCK
        self.first += len(gone)
        return gone

    def truncate(self, num_blocks: int) -> None:
        """Keep the first `num_blocks` entries of each group, and free the rest."""
        for row in self.rows:
            self.allocator.free(row[max(num_blocks, self.first) :])
            del row[num_blocks:]
        self.first = min(self.first, num_blocks)
