"""Lesson 5. Keeps track of which request holds which blocks: it stands between the scheduler and the block tables.

The manager holds numbers, no tensors. `allocate` tells the scheduler how many leading tokens already have KV, and
`commit` and `free` tell the manager which tokens have been computed, so the scheduler need not know whether anything is
cached. Nothing is cached in this lesson, so `allocate` returns 0; a coordinator that caches can be passed in.
"""

import logging
from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from mini_engine.base.errors import EngineDead, OutOfBlocks, UserError
from mini_engine.kv.coordinator import CopyBlocks, Cost, KvCoordinator, no_store
from mini_engine.kv.request_table import RequestTable

log = logging.getLogger(__name__)


class BlocksByState(NamedTuple):
    """The pool's blocks by state, without the null block. cached: held by no request, and not free either."""

    free: int
    held: int
    cached: int = 0


class KvCacheManager:
    """Maps request ids to block tables. Apart from `free`, a method that raises a documented error has changed nothing.

    Args:
        num_blocks: blocks in the pool, including the null block.
        block_size: slots per block.
        copy: copies blocks in the pool, `KvPool.copy_blocks`.
        coordinator: builds, from the first three, the part that the manager asks at each point of a request's life.

    Attributes:
        fault: why the blocks cannot be trusted any more, so that no step may run; empty as long as they can.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        copy: CopyBlocks = no_store,
        coordinator: Callable[[int, int, CopyBlocks], KvCoordinator] = KvCoordinator,
    ) -> None:
        self.coordinator = coordinator(num_blocks, block_size, copy)
        self.allocator = self.coordinator.allocator
        self.tables: dict[str, RequestTable] = {}
        self.fault = ""

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
        """Number of blocks that `grow` can hand out now."""
        return self.allocator.num_free + self.coordinator.num_evictable

    def most_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a request of `num_tokens` tokens ever holds."""
        return -(-num_tokens // self.block_size) + self.coordinator.most_beside(num_tokens)

    def cost(self, token_ids: Sequence[int], num_tokens: int, namespace: Hashable = None) -> Cost:
        """Return the cost of admitting a request now and promising it room. Takes no block.

        Args:
            num_tokens: the number of tokens it is promised room for, at least len(token_ids).
            namespace: as for `allocate`.
        """
        return self.coordinator.cost(token_ids, num_tokens, namespace, self.tables)

    def allocate(self, request_id: str, token_ids: Sequence[int], namespace: Hashable = None) -> int:
        """Begin a table for a request that has none.

        Args:
            namespace: only requests of the same namespace may share KV.

        Returns:
            the number of leading tokens that already have KV, in blocks that the table now holds.

        Raises:
            ValueError: the request has a table. OutOfBlocks: there is no room for one more. Nothing was changed.
        """
        if request_id in self.tables:
            raise ValueError(f"request {request_id!r} has a block table already; free it or grow it")
        if not self.coordinator.has_room:
            raise OutOfBlocks("there is no room for one more request beside the blocks; wait until one ends")
        self.tables[request_id] = RequestTable(self.allocator)
        return self.coordinator.begin(request_id, token_ids, namespace, self.tables)

    def missing_blocks(self, request_id: str, num_tokens: int) -> int:
        """Return how many more blocks the request needs to have slots for `num_tokens` tokens in total."""
        table = self.tables[request_id]
        missing = max(0, -(-num_tokens // self.allocator.block_size) - len(table.blocks))
        return missing + self.coordinator.num_beside(request_id, table, num_tokens)

    def grow(self, request_id: str, num_tokens: int) -> array:
        """Ensure that the request has slots for `num_tokens` tokens in total. Never takes any away.

        First `coordinator.prepare` may make room. The table's `num_tokens` rises to `num_tokens`; it never falls.

        Returns:
            its blocks, in order, as an int32 array: the table's `row`.

        Raises:
            OutOfBlocks: the pool cannot give the missing blocks; nothing was changed.
            KeyError: the request has no table.
        """
        table = self.tables[request_id]
        self.coordinator.prepare(request_id, table, num_tokens)
        if num_tokens > len(table.blocks) * self.allocator.block_size:
            table.append(num_tokens - table.num_tokens)
        elif num_tokens > table.num_tokens:  # most decode steps: the last block still has room
            table.num_tokens = num_tokens
        return table.row

    def chunk_end(self, request_id: str, start: int, stop: int) -> int:
        """Return the end of the request's chunk from `start`, at most `stop`."""
        return self.coordinator.chunk_end(request_id, start, stop)

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        """Report that the first `num_computed` tokens have KV."""
        self.coordinator.commit(request_id, self.tables[request_id], token_ids, num_computed)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Keep the request's first `num_tokens` tokens; free the blocks that hold none of them.

        Raises:
            ValueError: it holds fewer tokens, num_tokens is negative, or it cannot go back so far; nothing was changed.
            KeyError: the request has no table.
        """
        self.coordinator.truncate(request_id, self.tables[request_id], num_tokens)

    def free(self, request_id: str, computed_ids: Sequence[int] = ()) -> None:
        """Free all that a request holds; unknown ids are ignored.

        If that fails, blocks may be lost, or free although they are in use: `fault` says so from then on.

        Args:
            computed_ids: its leading tokens whose KV is written.

        Raises:
            EngineDead: something could not be released; the rest was.
        """
        try:
            self.coordinator.end(request_id, self.tables.pop(request_id, None), computed_ids)
        except BaseException as error:  # Ctrl-C, too, may have left a part half done
            if not isinstance(error, EngineDead):
                log.exception("not all that request %s held could be released", request_id)
            self.fault = self.fault or lost(request_id, error)
            if isinstance(error, Exception):
                raise EngineDead(self.fault) from error
            raise

    @property
    def blocks_by_state(self) -> BlocksByState:
        """Free, held and cached blocks, counted without reading any table."""
        cached = self.coordinator.num_evictable
        return BlocksByState(self.allocator.num_free, len(self.allocator.held) - cached, cached)


def lost(request_id: str, error: BaseException) -> str:
    """Return a sentence about a request whose blocks could not all be released because of this error."""
    if isinstance(error, EngineDead):
        return str(error)
    return (
        f"not all that request {request_id!r} held could be released ({type(error).__name__}: {error}); "
        "the engine's blocks cannot be trusted any more, start it again"
    )


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
            f"{num_blocks} blocks of {block_size} tokens ({bytes_per_token} bytes a token) fit in {budget_bytes}; "
            f"give {2 * bytes_per_token * block_size} or more, or use smaller blocks"
        )
    return num_blocks
