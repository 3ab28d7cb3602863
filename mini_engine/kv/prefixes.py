"""Lesson 8. The seam of the prefix cache. Here nothing is kept after a request has ended."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.coordinator import CopyBlocks
from mini_engine.kv.request_table import RequestTable


class Found(NamedTuple):
    """A prompt's prefix that a request would begin with now.

    num_tokens: its length. num_evictable: its blocks that count as free until a request shares them.
    prefix_in_flight: a running request is about to make it longer, so that waiting a step is worth more.
    """

    num_tokens: int = 0
    num_evictable: int = 0
    prefix_in_flight: bool = False


class Stored(NamedTuple):
    """Blocks that a prefix cache has taken: `blocks` hold the tokens of `key`, and those from index `start` on are new.

    key: the tokens, 4 bytes each. namespace: only its requests find them.
    """

    key: bytes
    namespace: Hashable
    blocks: Sequence[int]
    start: int


class Prefixes:
    """A prefix cache that caches nothing. What a cache notes of a request is in `table.shared`.

    Attributes:
        allocator: hands out the pool's blocks.
        tree: stored prefixes, or None. stats: hits and misses so far, or None.
    """

    tree: Any = None
    stats: Any = None

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.allocator = BlockAllocator(num_blocks, block_size)

    @property
    def num_evictable(self) -> int:
        """Blocks that only the cache holds: it gives them up when they are needed."""
        return 0

    def peek(self, token_ids: Sequence[int], namespace: Hashable, running: Mapping[str, RequestTable]) -> Found:
        """Return the prefix that `begin` would find. Changes nothing."""
        return Found()

    def begin(self, table: RequestTable, token_ids: Sequence[int], namespace: Hashable) -> int:
        """Begin an empty table with the blocks of the longest cached prefix; return how many tokens they hold."""
        return 0

    def num_known(self, table: RequestTable) -> int:
        """Return how many tokens of the request's prompt are cached, even if it could not begin after all of them."""
        return 0

    def num_shared(self, table: RequestTable, num_tokens: int) -> int:
        """Return how many shared blocks must be copied before the table can grow to `num_tokens` tokens."""
        return 0

    def prepare(self, table: RequestTable, num_tokens: int, copy: CopyBlocks, num_beside: int = 0) -> None:
        """Ensure that the table can grow to `num_tokens` tokens: evict, and copy a block that it may not write.

        Args:
            num_beside: blocks that the request takes beside those of its table.

        Raises:
            OutOfBlocks: there are too few, even so; nothing was evicted.
        """

    def commit(
        self, table: RequestTable, token_ids: Sequence[int], num_computed: int, to_the_end: bool
    ) -> Stored | None:
        """Take the blocks that are full by now. Return them, or None if there is nothing new.

        Args:
            to_the_end: the request's memory is worth keeping here, so take every block, and return them.
        """

    def extend(self, table: RequestTable, num_tokens: int) -> None:
        """Take the blocks up to `num_tokens` tokens, which a connector has just filled."""

    def truncate(self, table: RequestTable) -> None:
        """Note that the table has become shorter: other tokens may follow now."""

    def release(self, table: RequestTable, computed_ids: Sequence[int]) -> Stored | None:
        """Take the whole blocks of a request that ends; return them. Its table is freed next.

        What the request has locked is unlocked even if that fails. A table that did not begin has locked nothing.
        """

    def clear(self) -> None:
        """Give up all that is cached. Raises ValueError, and gives up nothing, while a request uses some of it."""
