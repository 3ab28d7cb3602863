"""Lesson 5. Whose blocks are whose: the bookkeeping between the scheduler, which knows requests, and the block tables.

The manager holds numbers, no tensors. It is also the seam for prefix sharing (lesson 8): a scheduler that asks
`allocate` how many leading tokens are already there, and tells `commit` and `free` which tokens have been computed,
need not know whether anything is kept. This manager keeps nothing, so its answer is always 0.
"""

from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from mini_engine.errors import OutOfBlocks, UserError
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.block_table import BlockTable, fragmentation_ratio, waste_ratio

CopyBlocks = Callable[[Sequence[int], Sequence[int]], None]


class BlocksByState(NamedTuple):
    """Where the pool's blocks are. The null block is not counted; `cached` stays 0 until lesson 8 keeps prefixes."""

    free: int
    held: int
    cached: int = 0


class Cost(NamedTuple):
    """What admitting a request would take: `num_blocks` of the free blocks.

    should_wait: the step being planned computes more of its prefix, which it can share one step later. Never set here:
        lesson 8's manager sets it.
    """

    num_blocks: int
    should_wait: bool = False


def no_store(sources: Sequence[int], targets: Sequence[int]) -> None:
    """The block copier of a manager that has no pool behind it: there is nothing to copy."""


class RequestTable(BlockTable):
    """A block table with its blocks a second time as int32, `row`, so that a step's table is made by copying memory."""

    def __init__(self, allocator: BlockAllocator) -> None:
        super().__init__(allocator)
        self.row = array("i")

    def append(self, count: int) -> None:
        """As in lesson 3."""
        super().append(count)
        self.row.fromlist(self.blocks[len(self.row) :])

    def truncate(self, num_tokens: int) -> None:
        """As in lesson 3."""
        super().truncate(num_tokens)
        del self.row[len(self.blocks) :]


class KvCacheManager:
    """Request id to BlockTable. Each method changes everything it says, or raises and changes nothing.

    Args:
        num_blocks: blocks of the pool, the null block included.
        block_size: slots in a block.
        copy: copies blocks in the pool, `KvPool.copy_blocks`: it reads all sources before it writes a target.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, copy: CopyBlocks = no_store) -> None:
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.copy = copy
        self.tables: dict[str, RequestTable] = {}

    @property
    def block_size(self) -> int:
        """Slots in a block."""
        return self.allocator.block_size

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold, all together: the pool without the null block."""
        return self.allocator.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `grow` can give now. A manager that keeps prefixes counts those it could evict as well."""
        return self.allocator.num_free

    def cost(self, token_ids: Sequence[int], num_tokens: int, namespace: Hashable = None) -> Cost:
        """Return what it would take to admit a request now and promise it room. Changes nothing.

        Args:
            num_tokens: how many tokens it is promised room for, those of `token_ids` or more.
            namespace: as for `allocate`.
        """
        return Cost(-(-num_tokens // self.block_size))

    def allocate(self, request_id: str, token_ids: Sequence[int], namespace: Hashable = None) -> int:
        """Begin a table for a request that has none.

        Args:
            namespace: with whom it may share what it computes, for a manager that keeps prefixes.

        Returns:
            how many of its leading tokens already have their KV, in blocks that the table now holds: 0 here.

        Raises:
            ValueError: the request has a table; nothing was changed.
        """
        if request_id in self.tables:
            raise ValueError(f"request {request_id!r} has a block table already; free it, or grow it")
        self.tables[request_id] = RequestTable(self.allocator)
        return 0

    def missing_blocks(self, request_id: str, num_tokens: int) -> int:
        """How many more blocks the request needs before `num_tokens` of its tokens have a slot."""
        return max(0, -(-num_tokens // self.allocator.block_size) - len(self.tables[request_id].blocks))

    def grow(self, request_id: str, num_tokens: int) -> array:
        """Let the request hold slots for `num_tokens` tokens, those it holds counted in.

        Returns:
            its blocks, in order, as int32.

        Raises:
            OutOfBlocks: the pool cannot give the missing blocks; nothing was changed.
            KeyError: the request has no table.
        """
        table = self.tables[request_id]
        if num_tokens > len(table.blocks) * self.allocator.block_size:
            table.append(num_tokens - table.num_tokens)
        elif num_tokens > table.num_tokens:  # most decode steps: no block to take, nobody to ask
            table.num_tokens = num_tokens
        return table.row

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        """The KV of the first `num_computed` tokens is written. A manager that keeps prefixes can share them now."""

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Keep the request's first `num_tokens` tokens; the blocks that hold none of them go back.

        Raises:
            ValueError: it does not hold that many; nothing was changed.
            KeyError: the request has no table.
        """
        self.tables[request_id].truncate(num_tokens)

    def free(self, request_id: str, computed_ids: Sequence[int] = ()) -> None:
        """Give back all that a request holds; an id without a table is no mistake.

        Args:
            computed_ids: its leading tokens whose KV is written, for a manager that keeps prefixes.
        """
        if table := self.tables.pop(request_id, None):
            table.free()

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks, as if all sources were read before any target is written: chains and swaps come out right.

        Raises:
            ValueError: lengths differ, a target is named twice, or a block is held by nobody; nothing was copied.
        """
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} sources and {len(targets)} targets; give one target for each source")
        if len(set(targets)) != len(targets):
            raise ValueError(f"a target is named twice in {list(targets)}; which copy should win?")
        if stray := sorted({*sources, *targets} - self.allocator.held):
            raise ValueError(f"blocks {stray} are held by nobody; copy between blocks that requests hold")
        self.copy(sources, targets)

    def fork(self, parent_id: str, child_id: str) -> None:
        """Give `child_id` what the parent holds, in blocks of its own: what one writes the other never sees.

        Raises:
            OutOfBlocks: there are not as many free blocks; nothing was changed.
            ValueError: the child has a table already. KeyError: the parent has none.
        """
        parent = self.tables[parent_id]
        if child_id in self.tables:
            raise ValueError(f"request {child_id!r} has a block table already; fork to a new id")
        child = RequestTable(self.allocator)
        child.append(parent.num_tokens)
        self.copy(parent.blocks, child.blocks)
        self.tables[child_id] = child

    @property
    def blocks_by_state(self) -> BlocksByState:
        """Free and held blocks, counted without a look at any table."""
        return BlocksByState(free=self.allocator.num_free, held=len(self.allocator.held))

    @property
    def fragmentation_ratio(self) -> float:
        """Partly filled blocks / allocated blocks."""
        return fragmentation_ratio(list(self.tables.values()))

    @property
    def waste_ratio(self) -> float:
        """Unused slots / allocated slots."""
        return waste_ratio(list(self.tables.values()))


def blocks_in_budget(budget_bytes: int, bytes_per_token: int, block_size: int) -> int:
    """Blocks that a memory budget pays for, the null block included.

    Raises:
        OutOfBlocks: not even two, so that nobody could hold one.
        UserError: the block size is not at least 1.
    """
    if block_size < 1:
        raise UserError(f"block_size is {block_size}; give 1 or more")
    num_blocks = int(budget_bytes // (bytes_per_token * block_size))
    if num_blocks < 2:
        raise OutOfBlocks(
            f"{budget_bytes} bytes pay for {num_blocks} blocks of {block_size} tokens at {bytes_per_token} bytes each; "
            f"give {2 * bytes_per_token * block_size} or more"
        )
    return num_blocks
