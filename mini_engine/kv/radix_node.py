"""Lesson 8. The nodes of the radix tree, and token ids as keys that compare in one go.

    root ── [system prompt, 3 blocks] ─┬─ [question A, 1 block]
                                       └─ [question B, 2 blocks] ── [answer, 1 block]

An edge holds whole blocks, so nodes are split at block edges and nowhere else. A child is found by all tokens of its
first block: every chat begins with the same token, so one token tells nothing.
"""

from array import array
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

TOKEN_BYTES = 4


def key_of(token_ids: Sequence[int] | bytes) -> bytes:
    """Token ids as bytes, 4 each, so that comparing thousands of tokens compares memory. A key stays as it is."""
    return token_ids if isinstance(token_ids, bytes) else array("I", token_ids).tobytes()


def common_blocks(edge: bytes | bytearray, key: bytes, at: int, width: int) -> int:
    """How many whole blocks of `width` bytes `edge` has in common with what `key` holds from byte `at` on."""
    low, high = 0, min(len(edge), len(key) - at) // width
    if key.startswith(edge[: high * width], at):
        return high
    while low < high:  # all before low are equal; the first that differs comes before high
        middle = (low + high + 1) // 2
        if edge[low * width : middle * width] == key[at + low * width : at + middle * width]:
            low = middle
        else:
            high = middle - 1
    return low


Label = tuple[Hashable, bytes]  # by which a node finds a child: the namespace, and the child's first block of tokens


class Node:
    """The edge that leads here, and what goes on from here.

    key: the edge's tokens as bytes. blocks: which hold their KV.
    label: by which the parent finds it. created, last_used: when, by the tree's own count of time.
    locks: users of this node and of all below it. num_hits: how often it was found.
    queued: the tree's eviction queue has an entry for it.
    """

    __slots__ = ("blocks", "children", "created", "key", "label", "last_used", "locks", "num_hits", "parent", "queued")

    def __init__(
        self, parent: "Node | None", label: Label, key: bytes | bytearray, blocks: list[int], now: int = 0
    ) -> None:
        self.parent, self.label, self.key, self.blocks = parent, label, bytearray(key), blocks
        self.children: dict[Label, Node] = {}
        self.created = self.last_used = now
        self.locks = self.num_hits = 0
        self.queued = False

    @property
    def is_evictable(self) -> bool:
        """A leaf that nobody uses, in the tree."""
        return not self.locks and not self.children and self.parent is not None

    def path(self) -> "Iterator[Node]":
        """This node and those above it, the root left out."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def split(self, num_blocks: int, width: int) -> "Node":
        """Cut the edge after `num_blocks` blocks of `width` bytes. Users who have locked this node keep it: it is the
        lower part, and as old as it was.

        Returns:
            the new node above it, which everybody who uses this one uses as well.

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
    """What a lookup would find: `num_tokens` tokens, and of their blocks `num_evictable` that no request has locked."""

    num_tokens: int
    num_evictable: int


class Match(NamedTuple):
    """A way from the root. `blocks` hold its `num_tokens` tokens, in order; `node` is where it ends."""

    node: Node
    blocks: list[int]
    num_tokens: int
