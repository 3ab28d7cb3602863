"""Lesson 8. The places in a stored prefix where a request can begin: behind every block, if K and V are all it needs.

A model that needs more than K and V of every token can begin only where the tree has that too (lessons 11 and 15).
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol

from mini_engine.kv.radix_node import TOKEN_BYTES, Node
from mini_engine.kv.request_table import RequestTable


class Lookup(Protocol):
    """What places need of the tree."""

    def path(self, token_ids: bytes, namespace: Hashable) -> list[Node]: ...

    def prefix(self, token_ids: bytes, namespace: Hashable) -> list[int]: ...


class Kept(Protocol):
    """Blocks that the tree holds beside its own: `NOTHING_KEPT`, or lesson 15's windows."""

    @property
    def num_evictable(self) -> int:
        """How many of them nothing else holds."""
        ...

    @property
    def blocks_each(self) -> int:
        """How many blocks are free, at the most, when the tree gives up one of its own, that one included."""
        ...

    def trim(self, num_blocks: int) -> None:
        """Free `num_blocks` of those that can go before any block of the tree, or all if there are fewer."""
        ...

    def evict(self, num_blocks: int) -> None:
        """Free `num_blocks` of the others, or all if there are fewer."""
        ...


class NothingKept:
    """A tree that holds its own blocks only."""

    num_evictable = 0
    blocks_each = 1

    def trim(self, num_blocks: int) -> None:
        """Do nothing."""

    def evict(self, num_blocks: int) -> None:
        """Do nothing."""


NOTHING_KEPT = NothingKept()


class Places(Protocol):
    """Where requests can begin: `EVERY_BLOCK`, lesson 11's checkpoints, or lesson 15's windows."""

    @property
    def kept(self) -> Kept:
        """Blocks that the tree holds for them."""
        ...

    def last(self, tree: Lookup, key: bytes, namespace: Hashable) -> int:
        """Return how many tokens of `key` are before the last place in what the tree has of it; it may be more."""
        ...

    def num_evictable(self, tree: Lookup, key: bytes, namespace: Hashable) -> int:
        """Return how many evictable blocks, beside the tree's own, a request takes that begins behind `key`."""
        ...

    def coming(self, request_id: str, table: RequestTable, num_found: int) -> Iterable[int]:
        """Return the places that a running request is on its way to, in tokens, for one that found `num_found`."""
        ...

    def drop(self, node: Node, blocks: Sequence[int]) -> None:
        """Forget the places in these blocks: the node has lost them from its end."""
        ...

    def shorten(self, leaf: Node) -> int:
        """Note that a text ends here now. Return how many more blocks go: those behind the last place to begin."""
        ...


class EveryBlock:
    """The places of a model that needs K and V alone."""

    kept: Kept = NOTHING_KEPT

    def last(self, tree: Lookup, key: bytes, namespace: Hashable) -> int:
        """Return all tokens of `key`."""
        return len(key) // TOKEN_BYTES

    def num_evictable(self, tree: Lookup, key: bytes, namespace: Hashable) -> int:
        """Return 0: the tree holds its own blocks only."""
        return 0

    def coming(self, request_id: str, table: RequestTable, num_found: int) -> Iterable[int]:
        """Return the end of the next block, if its first slot is in use and it will be stored: it is being computed."""
        index, size = num_found // table.allocator.block_size, table.allocator.block_size
        is_filling = table.shared.num_stored <= index < table.shared.num_whole and table.num_tokens > index * size
        return (num_found + size,) if is_filling else ()

    def drop(self, node: Node, blocks: Sequence[int]) -> None:
        """Do nothing: the places go with the blocks."""

    def shorten(self, leaf: Node) -> int:
        """Return 0: a request can begin behind every block."""
        return 0


EVERY_BLOCK = EveryBlock()
