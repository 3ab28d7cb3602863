"""Lesson 8. A prefix cache's note of a request's table: the part of it that is shared through the tree."""

from collections.abc import Hashable
from dataclasses import dataclass

from mini_engine.kv.radix_node import TOKEN_BYTES, Node


@dataclass
class SharedPrefix:
    """The part of a table that the tree has, or will have.

    key: the tokens it was admitted with, later also those of its answer, whole blocks only, as bytes.
    namespace: only requests of the same namespace share blocks. node: where the stored prefix that it has locked ends.
    num_stored: how many leading blocks the tree has. num_whole: how many hold, or will hold, the tokens of `key`.
    may_share_last: after a truncation, its partly filled last block may have other holders.
    """

    key: bytes
    namespace: Hashable
    node: Node
    num_stored: int
    num_whole: int
    may_share_last: bool = False

    def begins_like(self, whole: bytes, num_tokens: int) -> bool:
        """Return True if `whole` has at least `num_tokens` tokens and begins with the same ones as `key`."""
        size = num_tokens * TOKEN_BYTES
        return size <= len(whole) and whole[:size] == self.key[:size]
