"""Lesson 8. The answers of a prefix cache, and its note of a request: the part of a table that is shared."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mini_engine.kv.radix_node import TOKEN_BYTES, Node


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


@dataclass
class SharedPrefix:
    """The part of a table that the tree has, or will have.

    key: the tokens it was admitted with, later also those of its answer, whole blocks only, as bytes.
    namespace: only requests of the same namespace share blocks. node: where the stored prefix that it has locked ends.
    num_stored: how many leading blocks the tree has. num_whole: how many hold, or will hold, the tokens of `key`.
    may_share_last: after a truncation, its partly filled last block may have other holders.
    session: the conversation that the request is a turn of, if the client says so (lesson 20).
    """

    key: bytes
    namespace: Hashable
    node: Node
    num_stored: int
    num_whole: int
    may_share_last: bool = False
    session: Hashable = None

    def begins_like(self, whole: bytes, num_tokens: int) -> bool:
        """Return True if `whole` has at least `num_tokens` tokens and begins with the same ones as `key`."""
        size = num_tokens * TOKEN_BYTES
        return size <= len(whole) and whole[:size] == self.key[:size]
