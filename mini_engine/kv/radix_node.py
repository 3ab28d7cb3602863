"""Lesson 8. The nodes of the radix tree, and token ids packed into keys that a single memcmp compares.

    root ── [system prompt, 3 blocks] ─┬─ [question A, 1 block]
                                       └─ [question B, 2 blocks] ── [answer, 1 block]

An edge holds whole blocks, so nodes are split at block boundaries only. A child is looked up by all tokens of its first
block: every chat begins with the same token, so the first token alone tells nothing apart.
"""

from array import array
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

TOKEN_BYTES = 4


def key_of(token_ids: Sequence[int] | bytes) -> bytes:
    """Pack token ids into 4 bytes each, so that one memcmp compares thousands of them. Keys are returned unchanged."""
    return token_ids if isinstance(token_ids, bytes) else array("I", token_ids).tobytes()


def common_blocks(edge: bytes | bytearray, key: bytes, at: int, width: int) -> int:
    """Count the whole blocks of `width` bytes that `edge` shares with `key[at:]`, from the start of both."""
    low, high = 0, min(len(edge), len(key) - at) // width
    if key.startswith(edge[: high * width], at):
        return high
    while low < high:  # the first `low` blocks are equal; at most `high` are
        middle = (low + high + 1) // 2
        if edge[low * width : middle * width] == key[at + low * width : at + middle * width]:
            low = middle
        else:
            high = middle - 1
    return low


Label = tuple[Hashable, bytes]  # how a node looks up a child: the namespace, and the tokens of the child's first block


class Node:
    """A node together with the edge that leads to it.

    key: the edge's tokens as bytes. blocks: the blocks that hold their KV.
    label: this node's key in `parent.children`. created, last_used: ticks of the tree's own counter.
    locks: locks on this node and on all nodes below it. num_hits: how often it was found.
    queued: the rank of its entry in the tree's eviction queue; None if it has none.
    """

    __slots__ = ("blocks", "children", "created", "key", "label", "last_used", "locks", "num_hits", "parent", "queued")

    def __init__(
        self, parent: "Node | None", label: Label, key: bytes | bytearray, blocks: list[int], now: int = 0
    ) -> None:
        self.parent, self.label, self.key, self.blocks = parent, label, bytearray(key), blocks
        self.children: dict[Label, Node] = {}
        self.created = self.last_used = now
        self.locks = self.num_hits = 0
        self.queued: tuple[int, ...] | None = None

    @property
    def is_evictable(self) -> bool:
        """True if this is an unlocked leaf that is still in the tree."""
        return not self.locks and not self.children and self.parent is not None

    def path(self) -> "Iterator[Node]":
        """Yield this node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def split(self, num_blocks: int, width: int) -> "Node":
        """Split the edge after its first `num_blocks` blocks of `width` bytes each.

        This node remains as the lower part, below the new one and above its own children: requests that have locked it
        need no update. Both parts have its locks, hits and age.

        Returns:
            the new upper node, which takes this one's place in `parent.children` and is not in the eviction queue.

        Raises:
            ValueError: this is the root, which has no edge; nothing was changed.
        """
        if self.parent is None:
            raise ValueError("the root has no edge to split")
        upper = Node(self.parent, self.label, self.key[: num_blocks * width], self.blocks[:num_blocks], self.created)
        upper.locks, upper.num_hits, upper.last_used = self.locks, self.num_hits, self.last_used
        del self.key[: num_blocks * width], self.blocks[:num_blocks]
        self.parent.children[self.label] = upper
        self.parent, self.label = upper, (self.label[0], bytes(self.key[:width]))
        upper.children[self.label] = self
        return upper


class Peek(NamedTuple):
    """The result of a lookup: `num_tokens` tokens. `num_evictable` of their blocks are not locked by any request."""

    num_tokens: int
    num_evictable: int


class Match(NamedTuple):
    """A path from the root to `node`. `blocks` hold its `num_tokens` tokens, in order."""

    node: Node
    blocks: list[int]
    num_tokens: int
