"""Lesson 8. The seam for models that need more than K and V of every token. Here: K and V are all that a request needs.

    for a running request      what it holds beside its table, and where its chunks should end
    for a stored prefix        where in it a request can begin: after every block, if K and V are all it needs
    for the tree               blocks that the tree keeps for the memory, beside its own

Lesson 11's states and lesson 15's windows override what they need. A memory knows requests by their ids.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol

from mini_engine.kv.radix_node import TOKEN_BYTES, Node
from mini_engine.kv.request_table import RequestTable


class Lookup(Protocol):
    """The tree as a memory sees it."""

    def path(self, token_ids: bytes, namespace: Hashable) -> list[Node]: ...

    def prefix(self, token_ids: bytes, namespace: Hashable) -> list[int]: ...


class CacheMemory:
    """Memory that requests need beside the blocks of their tables: in this class, none.

    Attributes:
        begins_everywhere: a request can begin after every block of a stored prefix.
    """

    begins_everywhere = True

    # ---------------------------------------------------------------- how many blocks

    def most(self, num_tokens: int) -> int:
        """Return the most blocks that a request of `num_tokens` tokens ever holds beside its table."""
        return 0

    def cost(self, num_tokens: int, num_found: int) -> int:
        """Return the blocks beside its table of a request that begins after `num_found` of `num_tokens` tokens."""
        return 0

    def num_reserved(self, request_id: str, num_tokens: int) -> int:
        """Return how many more blocks a running request takes at most until `num_tokens` tokens are computed."""
        return 0

    def num_missing(self, request_id: str, num_tokens: int) -> int:
        """Return how many blocks `grow` takes."""
        return 0

    def grow(self, request_id: str, num_tokens: int) -> None:
        """Take blocks for `num_tokens` tokens; `num_missing` blocks are free."""

    # ---------------------------------------------------------------- a request's life

    @property
    def has_room(self) -> bool:
        """True if one more request can begin."""
        return True

    def begin(self, request_id: str, num_tokens: int, table: RequestTable, num_known: int) -> None:
        """Begin a prompt of `num_tokens` tokens after those of its table. The cache has K and V of `num_known`."""

    def expect(self, request_id: str, num_tokens: int) -> None:
        """Prepare to grow: the first `num_tokens` tokens come from a connector, and no step computes them."""

    def resume(self, request_id: str, table: RequestTable) -> None:
        """Go on after the table's tokens: a connector has filled this memory too."""

    def chunk_end(self, request_id: str, start: int, stop: int) -> int:
        """Return the end of a chunk from `start`, at most `stop`, at which the memory can be kept."""
        return stop

    def commit(self, request_id: str, num_computed: int) -> bool:
        """Note how many tokens have been computed. Return whether the memory is worth keeping as it is now."""
        return False

    def keep(self, request_id: str, table: RequestTable) -> None:
        """Keep it in the prefix cache, at the end of the table's stored blocks."""

    def settle(self, request_id: str) -> None:
        """Release what no later token needs. The prefix cache has taken the blocks that it wants."""

    def announce_drafts(self, request_id: str, num_drafts: int) -> None:
        """Prepare for tokens that may be taken back after the next step."""

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Go back to `num_tokens` tokens. Raises ValueError if that is impossible, and changes nothing."""

    def free(self, request_id: str) -> None:
        """Release everything that the request holds here, even if an error occurs. Unknown ids are ignored."""

    # ---------------------------------------------------------------- where a request can begin

    def last(self, tree: Lookup, key: bytes, namespace: Hashable) -> int:
        """Return the most tokens of `key` after which a request can begin; the tree may have fewer of them."""
        return len(key) // TOKEN_BYTES

    def num_evictable_after(self, tree: Lookup, key: bytes, namespace: Hashable) -> int:
        """Return how many of the `num_evictable` blocks a request takes if it begins after `key`."""
        return 0

    def coming(self, request_id: str, table: RequestTable, num_found: int) -> Iterable[int]:
        """Return places at which a request that found `num_found` tokens could begin once a running one has gone on.

        Here that is the end of the next block, if it will be stored and its first slot is in use: it is being computed.
        """
        index, size = num_found // table.allocator.block_size, table.allocator.block_size
        is_filling = table.shared.num_stored <= index < table.shared.num_whole and table.num_tokens > index * size
        return (num_found + size,) if is_filling else ()

    # ---------------------------------------------------------------- what the tree holds beside its own blocks

    @property
    def num_evictable(self) -> int:
        """The number of blocks that the tree keeps for this memory and nothing else holds."""
        return 0

    @property
    def blocks_each(self) -> int:
        """The most blocks that become free when the tree gives up one of its own, that one included."""
        return 1

    def trim(self, num_blocks: int) -> None:
        """Free `num_blocks` of those that can go before any block of the tree, or all if there are fewer."""

    def evict(self, num_blocks: int) -> None:
        """Free `num_blocks` of the others, or all if there are fewer."""

    def drop(self, node: Node, blocks: Sequence[int]) -> None:
        """Forget what goes with these blocks, which the node is about to lose from its end."""

    def shorten(self, leaf: Node) -> int:
        """Note that a text ends here now. Return how many more blocks go: no request can begin after them."""
        return 0


NO_MEMORY = CacheMemory()
