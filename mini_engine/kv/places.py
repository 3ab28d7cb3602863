"""Lesson 8. The places in a stored prefix where a request can begin: behind every block, if K and V are all it needs.

A model that keeps more than K and V can begin only where the tree has that too (lesson 11).
"""

from collections.abc import Hashable, Iterable
from typing import Protocol

from mini_engine.kv.radix_node import TOKEN_BYTES, Node
from mini_engine.kv.request_table import RequestTable


class Lookup(Protocol):
    """What places need of the tree."""

    def path(self, token_ids: bytes, namespace: Hashable) -> list[Node]: ...


class Places(Protocol):
    """Where requests can begin: `EVERY_BLOCK`, or lesson 11's checkpoints."""

    def last(self, tree: Lookup, key: bytes, namespace: Hashable) -> int:
        """Return how many tokens of `key` are before the last place in what the tree has of it; it may be more."""
        ...

    def coming(self, request_id: str, table: RequestTable, num_found: int) -> Iterable[int]:
        """Return the places that a running request is on its way to, in tokens, for one that found `num_found`."""
        ...

    def drop(self, node: Node) -> None:
        """Forget the place at the node's end: the node is about to lose blocks there."""
        ...


class EveryBlock:
    """The places of a model that needs K and V alone."""

    def last(self, tree: Lookup, key: bytes, namespace: Hashable) -> int:
        """Return all tokens of `key`."""
        return len(key) // TOKEN_BYTES

    def coming(self, request_id: str, table: RequestTable, num_found: int) -> Iterable[int]:
        """Return the end of the next block, if its first slot is in use and it will be stored: it is being computed."""
        index, size = num_found // table.allocator.block_size, table.allocator.block_size
        is_filling = table.shared.num_stored <= index < table.shared.num_whole and table.num_tokens > index * size
        return (num_found + size,) if is_filling else ()

    def drop(self, node: Node) -> None:
        """Do nothing: the places go with the blocks."""


EVERY_BLOCK = EveryBlock()
