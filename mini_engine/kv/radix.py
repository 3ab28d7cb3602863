"""Lesson 8. A radix tree over token ids: records which prefixes have their KV in the pool, and in which blocks.

Nodes and keys are in `radix_node.py`. A request locks the whole path from its prefix to the root, and locked nodes are
never evicted; unlocked prefixes stay until their blocks are needed. Radix trees for KV: Zheng et al., SGLang, 2024.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from threading import RLock

from mini_engine.base.errors import UserError
from mini_engine.kv.eviction import LRU, EvictionPolicy, EvictionQueue
from mini_engine.kv.memory import NO_MEMORY, CacheMemory
from mini_engine.kv.radix_node import TOKEN_BYTES, Label, Match, Node, Peek, common_blocks, key_of
from mini_engine.kv.refcount import RefCountedAllocator
from mini_engine.kv.watcher import NO_WATCHER, CacheWatcher


class NoCounts:
    """The holder of blocks of a tree that is used alone: nothing counts them, in place of a RefCountedAllocator."""

    def share(self, blocks: Collection[int]) -> None:
        """Record that the tree holds these blocks as well: a no-op."""

    def free(self, blocks: Collection[int]) -> None:
        """Record that the tree no longer holds them: a no-op."""


@dataclass
class HitStats:
    """Counts of lookups and hits, in calls and in tokens."""

    num_lookups: int = 0
    num_hits: int = 0
    asked_tokens: int = 0
    found_tokens: int = 0

    def count(self, asked: int, found: int) -> None:
        """Count a lookup of `asked` tokens that found the first `found` of them."""
        self.num_lookups += 1
        self.num_hits += found > 0
        self.asked_tokens += asked
        self.found_tokens += found

    @property
    def hit_rate(self) -> float:
        """Found tokens / asked tokens; 0 before the first lookup."""
        return self.found_tokens / self.asked_tokens if self.asked_tokens else 0.0


class RadixTree:
    """Stored prefixes and their blocks. Works alone or with a reference-counting allocator; thread-safe.

    Args:
        block_size: tokens per block.
        holder: notified of the blocks that the tree takes and releases.
        capacity: the maximum number of blocks in the tree; None for no limit.
        policy: chooses the leaf to evict next; LRU if None.
        memory, watcher: notified of nodes that lose blocks.

    Attributes:
        num_blocks: blocks in the tree, `num_evictable + num_protected`.
        num_protected: blocks of locked nodes. num_evicted: blocks evicted so far.
        stats: statistics of all calls of `match`.
    """

    def __init__(
        self,
        block_size: int = 16,
        holder: RefCountedAllocator | None = None,
        capacity: int | None = None,
        policy: EvictionPolicy | None = None,
        memory: CacheMemory = NO_MEMORY,
        watcher: CacheWatcher = NO_WATCHER,
    ) -> None:
        if capacity is not None and (type(capacity) is not int or capacity < 0):
            raise UserError(f"capacity is {capacity}; give a whole number of blocks, 0 or more, or None for no limit")
        if isinstance(policy, str | type):
            raise UserError(f"policy is {policy!r}; give an instance, such as LRU()")
        self.block_size, self.width = block_size, block_size * TOKEN_BYTES
        self.holder = holder or NoCounts()
        self.capacity, self.memory, self.watcher = capacity, memory, watcher
        self.root = Node(None, (None, b""), b"", [])
        self.policy = policy or LRU()
        self.queue = EvictionQueue(self.policy)
        self.num_blocks = self.num_protected = self.num_evicted = self.now = 0
        self.stats = HitStats()
        self.mutex = RLock()

    @property
    def num_evictable(self) -> int:
        """The number of blocks that `evict` could free in total."""
        with self.mutex:
            return self.num_blocks - self.num_protected

    def match(self, token_ids: Sequence[int] | bytes, namespace: Hashable = None, lock: bool = False) -> Match:
        """Return the longest stored prefix of `token_ids`, in whole blocks, and mark it as used now.

        Counts the lookup in `stats`, found or not, and a hit on every node of the path.

        Args:
            namespace: search only prefixes stored under this namespace; the others are invisible.
            lock: also lock the node, before any other thread can evict it; the caller must `unlock` it.
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
        """Return the size of what `match` would find, without splitting, counting or marking anything as used."""
        key = key_of(token_ids)
        with self.mutex:
            node, depth, child, common = self._walk(key, namespace)
            num_evictable = sum(len(part.blocks) for part in node.path() if not part.locks)
            if child and not child.locks:
                num_evictable += common
            return Peek((depth + common) * self.block_size, num_evictable)

    def path(self, token_ids: Sequence[int] | bytes, namespace: Hashable = None) -> list[Node]:
        """Return the nodes that `token_ids` match in full, the deepest first, without marking anything as used."""
        with self.mutex:
            return list(self._walk(key_of(token_ids), namespace)[0].path())

    def prefix(self, token_ids: Sequence[int] | bytes, namespace: Hashable = None) -> list[int]:
        """Return the blocks that `match` would find, in order, without marking anything as used."""
        with self.mutex:
            node, _, child, common = self._walk(key_of(token_ids), namespace)
            blocks = [block for part in reversed(list(node.path())) for block in part.blocks]
            return blocks + child.blocks[:common] if child else blocks

    def insert(
        self, token_ids: Sequence[int] | bytes, blocks: Sequence[int], namespace: Hashable = None, lock: bool = False
    ) -> Match:
        """Store a prefix. Where the tree already has the same tokens, it keeps its own blocks.

        The blocks that it lacks go into one new node, created now, and `holder` is told to share them. A node that is
        not locked is queued for eviction. Over capacity, other prefixes are evicted; if that is not enough, this one is
        stored without its end.

        Args:
            token_ids: tokens that fill `blocks` exactly, all with their KV written.
            namespace, lock: as for `match`.

        Returns:
            what the tree now has of the prefix. Where its blocks differ from the given ones, those are duplicates.

        Raises:
            ValueError: the tokens do not fill the blocks exactly; nothing was changed.
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
        """Protect a node and all nodes above it from eviction until `unlock`. Locks are counted; the root needs none.

        Raises:
            ValueError: the node has already been evicted; nothing was changed.
        """
        with self.mutex:
            if node.parent is None and node is not self.root:
                raise ValueError("this prefix was evicted before it was locked; call match with lock=True")
            for part in node.path():
                part.locks += 1
                if part.locks == 1:
                    self.num_protected += len(part.blocks)

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of this node. A leaf without locks is queued for eviction again.

        Raises:
            ValueError: the node is not locked; nothing was changed.
        """
        with self.mutex:
            if not node.locks and node is not self.root:
                raise ValueError("this prefix is not locked; unlock it once per lock")
            for part in node.path():
                part.locks -= 1
                if part.locks == 0:
                    self.num_protected -= len(part.blocks)
            self.queue.add(node)

    def evict(self, num_blocks: int) -> list[int]:
        """Release `num_blocks` blocks, or all unlocked ones if there are fewer, from the ends of leaves.

        Counts them in `num_evicted`, and frees them through `holder`.

        Returns:
            the released blocks, in the order in which they were released.
        """
        with self.mutex:
            gone: list[int] = []
            while len(gone) < num_blocks and (leaf := self.queue.pop()):
                gone += self._cut(leaf, num_blocks - len(gone))
            self.num_evicted += len(gone)
            self.holder.free(gone)
            return gone

    def clear(self) -> None:
        """Evict everything.

        Raises:
            ValueError: a prefix is locked; nothing was changed.
        """
        with self.mutex:
            if self.num_protected:
                raise ValueError(f"{self.num_protected} blocks are locked; let the requests that use them end first")
            self.evict(self.num_blocks)

    def _walk(self, key: bytes, namespace: Hashable) -> tuple[Node, int, Node | None, int]:
        """Walk down as far as `key` is stored.

        Returns:
            the last node that matches in full, and its depth in blocks; then the child that matches in part, if any,
            and how many of its blocks match.
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
        """Return the node where the stored part of `key` ends, and its depth in blocks; split an edge if necessary."""
        node, depth, child, common = self._walk(key, namespace)
        return (child.split(common, self.width), depth + common) if child and common else (node, depth)

    def _use(self, node: Node) -> Match:
        """Mark the path to `node` as used now and return it as a Match."""
        self.now += 1
        blocks: list[int] = []
        path = list(node.path())
        for part in reversed(path):
            part.last_used = self.now
            blocks += part.blocks
        return Match(node, blocks, len(blocks) * self.block_size)

    def _room(self, wanted: int, node: Node) -> int:
        """Return how many of `wanted` new blocks fit below `node` within the capacity, evicting others if necessary."""
        if self.capacity is None:
            return wanted
        self.lock(node)
        self.evict(self.num_blocks + wanted - self.capacity)
        self.unlock(node)
        return min(wanted, self.capacity - self.num_blocks)

    def _cut(self, leaf: Node, num_blocks: int) -> list[int]:
        """Remove up to `num_blocks` blocks from a leaf's end, and what is of no use without them (`memory`).

        The policy may let fewer go at a time. An empty leaf is removed; its parent may be next.
        """
        gone: list[int] = []
        num_blocks = min(num_blocks, self.policy.num_ready(leaf))
        while num_blocks:
            part = leaf.blocks[-num_blocks:][::-1]
            self.memory.drop(leaf, part)
            self.policy.lost(leaf, part)
            self.watcher.removed(part)
            del leaf.blocks[-num_blocks:], leaf.key[-num_blocks * self.width :]
            gone += part
            if not leaf.blocks and leaf.parent is not None:
                parent, leaf.parent = leaf.parent, None
                del parent.children[leaf.label]
                leaf = parent
            num_blocks = self.memory.shorten(leaf) if leaf.is_evictable else 0
        self.num_blocks -= len(gone)
        self.queue.add(leaf)
        return gone
