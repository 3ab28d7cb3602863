"""Lesson 5. The manager's seam: it asks a coordinator at each point of a request's life. This one has nothing to add.

Here a request holds the blocks of its table, and no token has KV before it is computed. A subclass may know better: it
overrides the methods that it needs.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.request_table import RequestTable

CopyBlocks = Callable[[Sequence[int], Sequence[int]], None]


class Cost(NamedTuple):
    """The cost of admitting a request: `num_blocks` of the free blocks.

    should_wait: something that it needs is on its way or not free yet, so it is better admitted a step later.
    """

    num_blocks: int
    should_wait: bool = False


def no_store(sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy nothing: the block copier of a manager without a pool."""


class KvCoordinator:
    """A coordinator without a cache: a request holds the blocks of its table and nothing else.

    Args:
        num_blocks: blocks in the pool, including the null block. block_size: slots per block.
        copy: copies blocks in the pool, `KvPool.copy_blocks`: it reads all sources before it writes any target.

    Attributes:
        allocator: hands out the pool's blocks.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, copy: CopyBlocks = no_store) -> None:
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.copy = copy

    @property
    def stats(self) -> Sequence[Any]:
        """Statistics of other places where KV is kept."""
        return ()

    @property
    def counts(self) -> Mapping[str, int]:
        """What the cache's policy counts, by a metric's name; nothing without a cache."""
        return MappingProxyType({})

    @property
    def num_evictable(self) -> int:
        """Blocks that no request holds and that are not free either; they can be freed at any time."""
        return 0

    @property
    def has_room(self) -> bool:
        """True if one more request can begin, as far as that does not depend on blocks."""
        return True

    def most_beside(self, num_tokens: int) -> int:
        """Return the most blocks that a request of `num_tokens` tokens ever holds beside its table."""
        return 0

    def num_beside(self, request_id: str, table: RequestTable, num_tokens: int) -> int:
        """Return how many blocks a running request needs until `num_tokens` tokens are computed, beside its table."""
        return 0

    def cost(
        self, token_ids: Sequence[int], num_tokens: int, namespace: Hashable, tables: Mapping[str, RequestTable]
    ) -> Cost:
        """Return the cost of admitting a request, as `KvCacheManager.cost` says. tables: those of running requests."""
        return Cost(-(-num_tokens // self.allocator.block_size))

    def request_added(self, request: Any) -> None:
        """Note that a request has joined the waiting queue."""

    def begin(
        self, request_id: str, token_ids: Sequence[int], namespace: Hashable, tables: dict[str, RequestTable]
    ) -> int:
        """Begin a request whose table is empty. Return how many leading tokens have KV, in blocks of the table now."""
        return 0

    def prepare(self, request_id: str, table: RequestTable, num_tokens: int) -> None:
        """Ensure that the table can grow to `num_tokens` tokens, or raise OutOfBlocks; here its `append` does."""

    def chunk_end(self, request_id: str, start: int, stop: int) -> int:
        """Return the end of a chunk from `start`, at most `stop`; here always `stop`."""
        return stop

    def announce_truncation(self, request_id: str, num_tokens: int) -> None:
        """Announce that `truncate` may take back the last `num_tokens` tokens of the request's next step."""

    def commit(self, request_id: str, table: RequestTable, token_ids: Sequence[int], num_computed: int) -> None:
        """Note that the first `num_computed` tokens have KV."""

    def truncate(self, request_id: str, table: RequestTable, num_tokens: int) -> None:
        """Keep the request's first `num_tokens` tokens, as `KvCacheManager.truncate` says."""
        table.truncate(num_tokens)

    def end(self, request_id: str, table: RequestTable | None, computed_ids: Sequence[int]) -> None:
        """Free the table of a request that ends, and everything else it holds.

        Args:
            table: None if the request has not begun. computed_ids: its leading tokens whose KV is written.
        """
        if table is not None:
            table.free()

    def close_session(self, session: Hashable, namespace: Hashable) -> bool:
        """Forget a conversation whose cached KV was kept for its next turn. Return False if unknown."""
        return False

    def clear(self) -> None:
        """Free all cached KV. Raises ValueError, and frees nothing, while a request uses some of it."""

    def close(self) -> None:
        """Release what is held outside the pool. Idempotent."""
