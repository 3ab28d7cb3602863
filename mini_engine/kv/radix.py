"""Lesson 8. A radix tree over token ids: which prefixes have their KV in the pool, and in which blocks.

Nodes and keys are in `radix_node.py`. What a request uses is locked along the whole way to the root and never evicted;
what nobody uses stays until its room is needed. Radix trees for KV: Zheng et al., SGLang, 2024.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Protocol

from mini_engine.errors import UserError
from mini_engine.kv.eviction import LRU, EvictionPolicy, EvictionQueue
from mini_engine.kv.radix_node import TOKEN_BYTES, Label, Match, Node, Peek, common_blocks, key_of


class BlockHolder(Protocol):
    """Who counts the holders of blocks: a RefCountedAllocator, or nobody."""

    def share(self, blocks: Collection[int]) -> None:
        """The tree holds these blocks as well."""

    def free(self, blocks: Collection[int]) -> None:
        """The tree does not hold them any more."""


class NobodyCounts:
    """The BlockHolder of a tree that is used alone."""

    def share(self, blocks: Collection[int]) -> None:
        """There is no count to raise."""

    def free(self, blocks: Collection[int]) -> None:
        """There is no count to lower."""


@dataclass
class HitStats:
    """What was asked for, and how much of it was there."""

    num_lookups: int = 0
    num_hits: int = 0
    asked_tokens: int = 0
    found_tokens: int = 0

    def count(self, asked: int, found: int) -> None:
        """One more lookup, of `asked` tokens, of which the first `found` were there."""
        self.num_lookups += 1
        self.num_hits += found > 0
        self.asked_tokens += asked
        self.found_tokens += found

    @property
    def hit_rate(self) -> float:
        """Found tokens / asked tokens; 0 where nothing was asked for."""
        return self.found_tokens / self.asked_tokens if self.asked_tokens else 0.0


class RadixTree:
    """Prefixes and their blocks. Works alone, or with whoever counts the blocks; safe to call from several threads.

    Args:
        block_size: tokens in a block.
        holder: is told which blocks the tree holds and lets go.
        capacity: the most blocks it may hold; None for as many as come.
        policy: which leaf is evicted first.

    Attributes:
        num_blocks: blocks in the tree, `num_evictable + num_protected`.
        num_protected: blocks that somebody has locked. num_evicted: blocks evicted so far.
        stats: of all lookups.
    """

    def __init__(
        self,
        block_size: int = 16,
        holder: BlockHolder | None = None,
        capacity: int | None = None,
        policy: EvictionPolicy | None = None,
    ) -> None:
        if capacity is not None and (type(capacity) is not int or capacity < 0):
            raise UserError(f"capacity is {capacity}; give a whole number of blocks, 0 or more, or None for no limit")
        if isinstance(policy, str | type):
            raise UserError(f"policy is {policy!r}; give an instance, such as LRU()")
        self.block_size, self.width = block_size, block_size * TOKEN_BYTES
        self.holder = holder or NobodyCounts()
        self.capacity = capacity
        self.root = Node(None, (None, b""), b"", [])
        self.queue: EvictionQueue[Node] = EvictionQueue(policy or LRU())
        self.num_blocks = self.num_protected = self.num_evicted = self.now = 0
        self.stats = HitStats()
        self.mutex = RLock()

    @property
    def num_evictable(self) -> int:
        """Blocks that `evict` could give, all together."""
        with self.mutex:
            return self.num_blocks - self.num_protected

    def match(self, token_ids: Sequence[int] | bytes, namespace: Hashable = None, lock: bool = False) -> Match:
        """The longest stored prefix of `token_ids`, in whole blocks. It counts as used now.

        Args:
            namespace: whose tree is searched; what one namespace stores no other finds.
            lock: lock it before anybody else can evict it; the caller must `unlock` the node.
        """
        key = key_of(token_ids)
        with self.mutex:
            node, depth = self._descend(key, namespace)
            self.stats.count(len(key) // TOKEN_BYTES, depth * self.block_size)
            for part in node.path():
                part.num_hits += 1
            if lock:
                self.lock(node)
            return self._use(node)

    def peek(self, token_ids: Sequence[int] | bytes, namespace: Hashable = None) -> Peek:
        """What `match` would find. Nothing is split, counted or marked as used."""
        key = key_of(token_ids)
        with self.mutex:
            node, depth, child, common = self._walk(key, namespace)
            num_evictable = sum(len(part.blocks) for part in node.path() if not part.locks)
            if child and not child.locks:
                num_evictable += common
            return Peek((depth + common) * self.block_size, num_evictable)

    def insert(
        self, token_ids: Sequence[int] | bytes, blocks: Sequence[int], namespace: Hashable = None, lock: bool = False
    ) -> Match:
        """Store a prefix. For those of its blocks that the tree has already, it keeps its own.

        Over capacity, other prefixes are evicted; if that is not enough, the end of this one is left out.

        Args:
            token_ids: tokens that fill `blocks` exactly, all with their KV written.

        Returns:
            what the tree has of it now. Where its blocks are not the ones given, the given ones are duplicates.

        Raises:
            ValueError: tokens and blocks do not fit each other; nothing was changed.
        """
        key = key_of(token_ids)
        if len(key) != len(blocks) * self.width:
            raise ValueError(
                f"{len(key) // TOKEN_BYTES} tokens do not fill {len(blocks)} blocks of {self.block_size}; "
                "insert whole blocks"
            )
        with self.mutex:
            node, depth = self._descend(key, namespace)
            new = list(blocks[depth : depth + self._room(len(blocks) - depth, node)])
            if new:
                self.holder.share(new)
                part = key[depth * self.width : (depth + len(new)) * self.width]
                parent, label = node, self._label(key, depth, namespace)
                node = parent.children[label] = Node(parent, label, part, new, self.now)
                self.num_blocks += len(new)
            match = self._use(node)
            self.lock(node) if lock else self.queue.add(node)
            return match

    def lock(self, node: Node) -> None:
        """Protect a node and all above it until `unlock`. May be called several times.

        Raises:
            ValueError: the node was evicted before; nothing was changed.
        """
        with self.mutex:
            if node.parent is None and node is not self.root:
                raise ValueError("this prefix was evicted before it was locked; match and lock in one call")
            for part in node.path():
                part.locks += 1
                if part.locks == 1:
                    self.num_protected += len(part.blocks)

    def unlock(self, node: Node) -> None:
        """Take back one `lock` of this node.

        Raises:
            ValueError: it is not locked; nothing was changed.
        """
        with self.mutex:
            if not node.locks and node is not self.root:
                raise ValueError("this prefix is not locked; unlock it once for each time that it was locked")
            for part in node.path():
                part.locks -= 1
                if part.locks == 0:
                    self.num_protected -= len(part.blocks)
            self.queue.add(node)

    def evict(self, num_blocks: int) -> list[int]:
        """Let go of `num_blocks` blocks, or of as many as nobody has locked: leaves only, each from its end.

        Returns:
            the blocks, which the tree does not hold any more.
        """
        with self.mutex:
            gone: list[int] = []
            while len(gone) < num_blocks and (leaf := self.queue.pop()):
                gone += self._cut(leaf, num_blocks - len(gone))
            self.num_evicted += len(gone)
            self.holder.free(gone)
            return gone

    def clear(self) -> None:
        """Forget everything.

        Raises:
            ValueError: somebody has locked a prefix; nothing was changed.
        """
        with self.mutex:
            if self.num_protected:
                raise ValueError(f"{self.num_protected} blocks are locked; let the requests that use them end first")
            self.evict(self.num_blocks)

    def _walk(self, key: bytes, namespace: Hashable) -> tuple[Node, int, Node | None, int]:
        """Down as far as `key` goes: the last node reached, its depth, and the child and blocks of it that fit as well.

        Depth and blocks are counted in blocks.
        """
        node, depth, width = self.root, 0, self.width
        while child := node.children.get(self._label(key, depth, namespace)):
            common = common_blocks(child.key, key, depth * width, width)
            if common < len(child.blocks):
                return node, depth, child, common
            node, depth = child, depth + common
        return node, depth, None, 0

    def _label(self, key: bytes, depth: int, namespace: Hashable) -> Label:
        return namespace, key[depth * self.width : (depth + 1) * self.width]

    def _descend(self, key: bytes, namespace: Hashable) -> tuple[Node, int]:
        """The node where the stored part of `key` ends, made by a split if that is inside an edge, and its depth."""
        node, depth, child, common = self._walk(key, namespace)
        return (child.split(common, self.width), depth + common) if child and common else (node, depth)

    def _use(self, node: Node) -> Match:
        """The way to `node`, used now."""
        self.now += 1
        blocks: list[int] = []
        path = list(node.path())
        for part in reversed(path):
            part.last_used = self.now
            blocks += part.blocks
        return Match(node, blocks, len(blocks) * self.block_size)

    def _room(self, wanted: int, node: Node) -> int:
        """How many of `wanted` blocks the capacity lets in below `node`, others evicted if need be."""
        if self.capacity is None:
            return wanted
        self.lock(node)
        self.evict(self.num_blocks + wanted - self.capacity)
        self.unlock(node)
        return min(wanted, self.capacity - self.num_blocks)

    def _cut(self, leaf: Node, num_blocks: int) -> list[int]:
        """Take up to `num_blocks` blocks from a leaf's end. Without blocks it is gone, and its parent may be a leaf."""
        gone = leaf.blocks[-num_blocks:][::-1]
        del leaf.blocks[-num_blocks:], leaf.key[-num_blocks * self.width :]
        self.num_blocks -= len(gone)
        if leaf.blocks or leaf.parent is None:
            self.queue.add(leaf)
            return gone
        parent, leaf.parent = leaf.parent, None
        del parent.children[leaf.label]
        self.queue.add(parent)
        return gone
