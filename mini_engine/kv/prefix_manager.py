"""Lesson 8. Lesson 5's manager with prefix caching: KV stays after a request ends, for prompts with the same beginning.

A block is free, held by requests, or cached: only the tree holds it, and it can be evicted. A request locks the prefix
it uses in the same call that finds it. A request whose prefix is being computed in this very step should wait, and
`cost` says so: one step later the tree has it.
"""

from array import array
from collections.abc import Hashable, Sequence

from mini_engine.errors import OutOfBlocks
from mini_engine.kv.eviction import EvictionPolicy
from mini_engine.kv.manager import BlocksByState, CopyBlocks, Cost, KvCacheManager, RequestTable, no_store
from mini_engine.kv.radix import HitStats, RadixTree
from mini_engine.kv.radix_node import TOKEN_BYTES, Node, key_of
from mini_engine.kv.refcount import RefCountedAllocator


class PrefixTable(RequestTable):
    """A request's block table, and which part of it is shared through the tree.

    key: the tokens it was admitted with, whole blocks only, as bytes.
    namespace: only requests of the same namespace share blocks. node: where the stored prefix that it has locked ends.
    num_whole: leading blocks that hold, or will hold, the tokens of `key`. num_stored: how many of them the tree has.
    may_share_last: after a fork or a truncation, its partly filled last block may have other holders.
    """

    allocator: RefCountedAllocator

    def __init__(self, allocator: RefCountedAllocator, key: bytes, namespace: Hashable, node: Node) -> None:
        super().__init__(allocator)
        self.key, self.namespace, self.node = key, namespace, node
        self.num_whole = len(key) // (allocator.block_size * TOKEN_BYTES)
        self.num_stored = sum(len(part.blocks) for part in node.path())
        self.may_share_last = False

    def is_filling(self, index: int) -> bool:
        """Whether block `index` of `key` is being computed: its first slot is in use, and the tree lacks the block."""
        return self.num_stored <= index < self.num_whole and self.num_tokens > index * self.allocator.block_size

    def adopt(self, blocks: Sequence[int], num_tokens: int) -> None:
        """Begin the table with shared blocks, which hold the first `num_tokens` tokens."""
        self.allocator.share(blocks)
        self.blocks += blocks
        self.row.fromlist(self.blocks)
        self.num_tokens = num_tokens

    def replace(self, indices: Sequence[int], blocks: Sequence[int]) -> None:
        """Put `blocks`, whose counts already include this table, at `indices`; free the blocks they replace."""
        old = [self.blocks[index] for index in indices]
        for index, block in zip(indices, blocks, strict=True):
            self.blocks[index] = self.row[index] = block
        self.allocator.free(old)


class PrefixCacheManager(KvCacheManager):
    """A KvCacheManager that shares prefixes. Methods not overridden here behave as in lesson 5.

    Args:
        num_blocks, block_size, copy: as in lesson 5.
        capacity: the maximum number of blocks in the tree; None for no limit but the pool.
        policy: which stored prefix is evicted first: LRU, LFU or FIFO of `eviction.py`.

    Attributes:
        stats: prompt tokens of all admitted requests, and how many of them were found.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        copy: CopyBlocks = no_store,
        capacity: int | None = None,
        policy: EvictionPolicy | None = None,
    ) -> None:
        super().__init__(num_blocks, block_size, copy)
        self.allocator = RefCountedAllocator(num_blocks, block_size)
        self.tree = RadixTree(block_size, self.allocator, capacity, policy)
        self.tables: dict[str, PrefixTable] = {}
        self.stats = HitStats()

    @property
    def num_free_blocks(self) -> int:
        """Blocks available to `grow`: free ones, and cached ones, which can be evicted."""
        return self.allocator.num_free + self.tree.num_evictable

    @property
    def blocks_by_state(self) -> BlocksByState:
        """Free, held and cached blocks; together they are the pool without the null block."""
        cached = self.tree.num_evictable
        return BlocksByState(self.allocator.num_free, len(self.allocator.held) - cached, cached)

    def cost(self, token_ids: Sequence[int], num_tokens: int, namespace: Hashable = None) -> Cost:
        """As in lesson 5, minus the stored blocks that running requests have locked: sharing those costs nothing.

        The request should wait if a running request is computing the first block that it would not find.
        """
        usable = self._usable(key_of(token_ids))
        found = self.tree.peek(usable, namespace)
        end = found.num_tokens * TOKEN_BYTES + self.tree.width
        should_wait = end <= len(usable) and self._is_coming(usable[:end], namespace)
        missing = super().cost(token_ids, num_tokens - found.num_tokens).num_blocks
        return Cost(missing + found.num_evictable, should_wait)

    def allocate(self, request_id: str, token_ids: Sequence[int], namespace: Hashable = None) -> int:
        """Begin a table with the stored blocks of the longest cached prefix, locked by the same call that finds them.

        The table's `key` has all whole blocks of the prompt. The lookup is counted in `stats`, with all prompt tokens.

        Args:
            namespace: only requests of the same namespace share blocks.

        Returns:
            how many leading tokens already have their KV: never all, so that at least one is computed and gives logits.

        Raises:
            ValueError: the request has a table; nothing was changed.
        """
        super().allocate(request_id, token_ids, namespace)
        key = key_of(token_ids)
        match = self.tree.match(self._usable(key), namespace, lock=True)
        whole = key[: len(token_ids) // self.block_size * self.tree.width]
        table = PrefixTable(self.allocator, whole, namespace, match.node)
        table.adopt(match.blocks, match.num_tokens)
        self.stats.count(len(token_ids), match.num_tokens)
        self.tables[request_id] = table
        return match.num_tokens

    def missing_blocks(self, request_id: str, num_tokens: int) -> int:
        """As in lesson 5, plus one if the next token would be written into a block that has other holders."""
        table, missing = self.tables[request_id], super().missing_blocks(request_id, num_tokens)
        return missing + self._writes_shared(table, num_tokens) if table.may_share_last else missing

    def grow(self, request_id: str, num_tokens: int) -> array:
        """As in lesson 5. Evicts unlocked prefixes if necessary, and copies a shared block before it is written."""
        table = self.tables[request_id]
        if num_tokens > len(table.blocks) * self.allocator.block_size or table.may_share_last:
            self._make_free(self.missing_blocks(request_id, num_tokens))
            if self._writes_shared(table, num_tokens):
                self._copy_on_write(table)
        return super().grow(request_id, num_tokens)

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        """Store the prompt's blocks that are full by now; from the next step on, other requests find them."""
        table = self.tables[request_id]
        if table.num_stored < table.num_whole:
            self.store(table, min(table.num_whole, num_computed // self.block_size))

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """As in lesson 5. New tokens may differ from the stored ones, so only the blocks that remain stay locked."""
        table = self.tables[request_id]
        super().truncate(request_id, num_tokens)
        table.may_share_last = True
        if table.num_stored > len(table.blocks):
            self._keep_locked(table, len(table.blocks))
        table.num_whole = min(table.num_whole, num_tokens // self.block_size)

    def free(self, request_id: str, computed_ids: Sequence[int] = ()) -> None:
        """As in lesson 5, but the whole blocks of `computed_ids` stay in the tree."""
        if table := self.tables.get(request_id):
            if whole := self._storable(table, len(computed_ids) // self.block_size):
                self.tree.insert(computed_ids[: whole * self.block_size], table.blocks[:whole], table.namespace)
            self.tree.unlock(table.node)
        super().free(request_id)

    def fork(self, parent_id: str, child_id: str) -> None:
        """Share the parent's blocks with `child_id`. Nothing is copied until one of the two writes into a shared block.

        Raises:
            ValueError: the child has a table already. KeyError: the parent has none. Nothing was changed.
        """
        parent = self.tables[parent_id]
        if child_id in self.tables:
            raise ValueError(f"request {child_id!r} has a block table already; fork to a new id")
        child = PrefixTable(self.allocator, parent.key, parent.namespace, parent.node)
        child.num_whole = min(parent.num_whole, parent.num_stored)  # its own tokens may differ from the rest of key
        self.tree.lock(child.node)
        child.adopt(parent.blocks, parent.num_tokens)
        parent.may_share_last = child.may_share_last = True
        self.tables[child_id] = child

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """As in lesson 5, but a shared block is refused as a target: its other holders would read foreign KV."""
        shared = [block for block in targets if self.allocator.counts[block] > 1]
        if shared:
            raise ValueError(f"blocks {shared} are shared; copy only into blocks with a single holder")
        super().copy_blocks(sources, targets)

    def clear(self) -> None:
        """Evict all prefixes.

        Raises:
            ValueError: a request uses one of them; nothing was changed.
        """
        self.tree.clear()

    def _make_free(self, num_blocks: int) -> None:
        """Ensure `num_blocks` free blocks, evicting if necessary, or raise OutOfBlocks and evict nothing."""
        if num_blocks <= self.allocator.num_free:
            return
        if num_blocks > self.num_free_blocks:
            raise OutOfBlocks(f"need {num_blocks} blocks, {self.num_free_blocks} free of {self.num_usable_blocks}")
        self.tree.evict(num_blocks - self.allocator.num_free)

    def store(self, table: PrefixTable, num_blocks: int) -> None:
        """Store the table's first `num_blocks` blocks, and lock them instead of those it had locked before.

        Where the tree already has the same tokens, the table switches to the tree's blocks, and its own, duplicates
        now, are freed. The path is never without a lock: the new one is taken before the old one is given up. Updates
        `node` and `num_stored`, and `num_whole` if the tree has no room for all blocks.
        """
        key = table.key[: num_blocks * self.tree.width]
        stored = self.tree.insert(key, table.blocks[:num_blocks], table.namespace, lock=True)
        self.tree.unlock(table.node)
        table.node, table.num_stored = stored.node, len(stored.blocks)
        if table.num_stored < num_blocks:  # the tree's capacity is used up: do not retry at every step
            table.num_whole = table.num_stored
        twice = [index for index, block in enumerate(stored.blocks) if table.blocks[index] != block]
        if twice:
            theirs = [stored.blocks[index] for index in twice]
            self.allocator.share(theirs)
            table.replace(twice, theirs)

    def _storable(self, table: PrefixTable, num_blocks: int) -> int:
        """How many of the first `num_blocks` blocks may be stored: those before the first new block that a fork shares.

        The fork has not locked that block, so it must not become evictable.
        """
        for index in range(min(table.num_stored, num_blocks), num_blocks):
            if self.allocator.counts[table.blocks[index]] > 1:
                return index
        return num_blocks

    def _writes_shared(self, table: PrefixTable, num_tokens: int) -> bool:
        """Whether the next token would be written into a block that has other holders."""
        index, offset = divmod(table.num_tokens, self.block_size)
        return bool(offset) and num_tokens > table.num_tokens and self.allocator.counts[table.blocks[index]] > 1

    def _copy_on_write(self, table: PrefixTable) -> None:
        """Replace the table's last block by a private copy."""
        index = table.num_tokens // self.block_size
        own = self.allocator.alloc_blocks(1)
        self.copy([table.blocks[index]], own)
        table.replace([index], own)
        self._keep_locked(table, min(table.num_stored, index))

    def _keep_locked(self, table: PrefixTable, num_blocks: int) -> None:
        """Keep the first `num_blocks` stored blocks of the table locked, and unlock the rest."""
        node = self.tree.match(table.key[: num_blocks * self.tree.width], table.namespace, lock=True).node
        self.tree.unlock(table.node)
        table.node, table.num_stored = node, num_blocks

    def _usable(self, key: bytes) -> bytes:
        """Return the whole blocks of a prompt that may be cached. Its last token is left out: it must be computed."""
        return key[: (len(key) - 1) // self.tree.width * self.tree.width]

    def _is_coming(self, prefix: bytes, namespace: Hashable) -> bool:
        """Whether a running request is computing the last block of `prefix` and will store it."""
        index = len(prefix) // self.tree.width - 1
        return any(
            table.is_filling(index) and table.namespace == namespace and table.key.startswith(prefix)
            for table in self.tables.values()
        )
