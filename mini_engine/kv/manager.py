"""Lesson 5. Keeps track of which request holds which blocks: it stands between the scheduler and the block tables.

The manager holds numbers, no tensors. It is also where prefix sharing plugs in (lesson 8): `allocate` tells the
scheduler how many leading tokens already have KV, and `commit` and `free` tell the manager which tokens have been
computed, so the scheduler need not know whether anything is cached. This manager caches nothing: it always answers 0.
"""

from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from mini_engine.errors import OutOfBlocks, UserError
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.block_table import BlockTable, fragmentation_ratio, waste_ratio

CopyBlocks = Callable[[Sequence[int], Sequence[int]], None]


class BlocksByState(NamedTuple):
    """The pool's blocks by state, without the null block. `cached` stays 0 until lesson 8 keeps prefixes."""

    free: int
    held: int
    cached: int = 0


class Cost(NamedTuple):
    """The cost of admitting a request: `num_blocks` of the free blocks.

    should_wait: the step being planned computes more of its prefix, which it can share one step later. Only lesson 8's
        manager sets it.
    """

    num_blocks: int
    should_wait: bool = False


def no_store(sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy nothing: the block copier of a manager without a pool."""


class RequestTable(BlockTable):
    """A block table that also keeps its blocks as int32, `row`, so that building a step's table is a memory copy."""

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
    """Maps request ids to block tables. Each method either succeeds completely, or raises and changes nothing.

    Args:
        num_blocks: blocks in the pool, including the null block.
        block_size: slots per block.
        copy: copies blocks in the pool, `KvPool.copy_blocks`: it reads all sources before it writes any target.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, copy: CopyBlocks = no_store) -> None:
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.copy = copy
        self.tables: dict[str, RequestTable] = {}

    @property
    def block_size(self) -> int:
        """Slots per block."""
        return self.allocator.block_size

    @property
    def num_usable_blocks(self) -> int:
        """Number of blocks that requests can hold in total: the pool without the null block."""
        return self.allocator.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that `grow` can hand out now. A manager that caches prefixes includes those it can evict."""
        return self.allocator.num_free

    def cost(self, token_ids: Sequence[int], num_tokens: int, namespace: Hashable = None) -> Cost:
        """Return the cost of admitting a request now and promising it room. Changes nothing.

        Args:
            num_tokens: the number of tokens it is promised room for, at least len(token_ids).
            namespace: as for `allocate`.
        """
        return Cost(-(-num_tokens // self.block_size))

    def allocate(self, request_id: str, token_ids: Sequence[int], namespace: Hashable = None) -> int:
        """Begin a table for a request that has none.

        Args:
            namespace: requests of the same namespace may share prefixes, if the manager caches them.

        Returns:
            the number of leading tokens that already have KV, in blocks that the table now holds: 0 here.

        Raises:
            ValueError: the request has a table; nothing was changed.
        """
        if request_id in self.tables:
            raise ValueError(f"request {request_id!r} has a block table already; free it or grow it")
        self.tables[request_id] = RequestTable(self.allocator)
        return 0

    def missing_blocks(self, request_id: str, num_tokens: int) -> int:
        """Return how many more blocks the request needs to have slots for `num_tokens` tokens in total."""
        return max(0, -(-num_tokens // self.allocator.block_size) - len(self.tables[request_id].blocks))

    def grow(self, request_id: str, num_tokens: int) -> array:
        """Ensure that the request has slots for `num_tokens` tokens in total. Never takes any away.

        Its table's `num_tokens` rises to `num_tokens`; it never falls.

        Returns:
            its blocks, in order, as an int32 array: the table's `row`.

        Raises:
            OutOfBlocks: the pool cannot give the missing blocks; nothing was changed.
            KeyError: the request has no table.
        """
        table = self.tables[request_id]
        if num_tokens > len(table.blocks) * self.allocator.block_size:
            table.append(num_tokens - table.num_tokens)
        elif num_tokens > table.num_tokens:  # most decode steps: the last block still has room
            table.num_tokens = num_tokens
        return table.row

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        """Report that the first `num_computed` tokens have KV. A manager that caches prefixes can share them now."""

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Keep the request's first `num_tokens` tokens; free the blocks that hold none of them.

        Raises:
            ValueError: it holds fewer tokens, or num_tokens is negative; nothing was changed.
            KeyError: the request has no table.
        """
        self.tables[request_id].truncate(num_tokens)

    def free(self, request_id: str, computed_ids: Sequence[int] = ()) -> None:
        """Free all blocks of a request; unknown ids are ignored.

        Args:
            computed_ids: its leading tokens whose KV is written, for a manager that caches prefixes.
        """
        if table := self.tables.pop(request_id, None):
            table.free()

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks as if all sources were read before any target is written, so chains and swaps are correct.

        Raises:
            ValueError: lengths differ, a target is named twice, or no request holds a block; nothing was copied.
        """
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} sources and {len(targets)} targets; give one target for each source")
        if len(set(targets)) != len(targets):
            raise ValueError(f"a target is named twice in {list(targets)}; which copy should win?")
        if stray := sorted({*sources, *targets} - self.allocator.held):
            raise ValueError(f"blocks {stray} are not held; copy only between blocks that requests hold")
        self.copy(sources, targets)

    def fork(self, parent_id: str, child_id: str) -> None:
        """Copy the parent's tokens into new blocks for `child_id`: neither sees what the other writes afterwards.

        Raises:
            OutOfBlocks: there are not enough free blocks; nothing was changed.
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
        """Free and held blocks, counted without reading any table."""
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
    """Return how many blocks fit in a memory budget, including the null block.

    Raises:
        OutOfBlocks: fewer than two fit, which leaves none for requests.
        UserError: the block size is not at least 1.
    """
    if block_size < 1:
        raise UserError(f"block_size is {block_size}; give 1 or more")
    num_blocks = int(budget_bytes // (bytes_per_token * block_size))
    if num_blocks < 2:
        raise OutOfBlocks(
            f"{num_blocks} blocks of {block_size} tokens ({bytes_per_token} bytes each) fit in {budget_bytes} bytes; "
            f"give {2 * bytes_per_token * block_size} or more"
        )
    return num_blocks
