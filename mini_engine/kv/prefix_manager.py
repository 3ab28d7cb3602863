"""Lesson 8. Lesson 5's manager, which keeps what was computed: the next prompt that begins the same finds it.

A block is free, held by requests, or cached: only the tree holds it, and it can be evicted. Whoever uses a stored
prefix has locked it, from the call that found it on. A request whose prefix is being computed in this very step should
wait for it, and `cost` says so: one step later the tree has it.
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
    """A request's blocks, and what of them it shares.

    key: the tokens of the whole blocks that it was admitted with, as bytes.
    namespace: with whom it shares. node: the stored prefix that it has locked.
    num_whole: blocks of `key` that hold, or will hold, its tokens. num_stored: those that are in the tree.
    may_share_last: it was forked or cut, so others may hold its partly filled last block.
    """

    allocator: RefCountedAllocator

    def __init__(self, allocator: RefCountedAllocator, key: bytes, namespace: Hashable, node: Node) -> None:
        super().__init__(allocator)
        self.key, self.namespace, self.node = key, namespace, node
        self.num_whole = len(key) // (allocator.block_size * TOKEN_BYTES)
        self.num_stored = sum(len(part.blocks) for part in node.path())
        self.may_share_last = False

    def is_filling(self, index: int) -> bool:
        """Whether block `index` of `key` is being computed: its first slot is taken, and the tree does not have it."""
        return self.num_stored <= index < self.num_whole and self.num_tokens > index * self.allocator.block_size

    def adopt(self, blocks: Sequence[int], num_tokens: int) -> None:
        """Begin with blocks of others, which hold the first `num_tokens` tokens."""
        self.allocator.share(blocks)
        self.blocks += blocks
        self.row.fromlist(self.blocks)
        self.num_tokens = num_tokens

    def replace(self, indices: Sequence[int], blocks: Sequence[int]) -> None:
        """Hold `blocks`, on which the table has a count already, at `indices`; let go of those that were there."""
        old = [self.blocks[index] for index in indices]
        for index, block in zip(indices, blocks, strict=True):
            self.blocks[index] = self.row[index] = block
        self.allocator.free(old)


class PrefixCacheManager(KvCacheManager):
    """A KvCacheManager that shares. What it does not say anew below it does as in lesson 5.

    Args:
        num_blocks, block_size, copy: as in lesson 5.
        capacity: the most blocks that may be kept for later; None for what the requests leave.
        policy: which stored prefix goes first: LRU, LFU or FIFO of `eviction.py`.

    Attributes:
        stats: asked and found tokens of all admitted requests.
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
        """Blocks that `grow` can give now: those that nobody holds, and those that only the tree holds."""
        return self.allocator.num_free + self.tree.num_evictable

    @property
    def blocks_by_state(self) -> BlocksByState:
        """Free, held by requests, and cached; together they are the pool."""
        cached = self.tree.num_evictable
        return BlocksByState(self.allocator.num_free, len(self.allocator.held) - cached, cached)

    def cost(self, token_ids: Sequence[int], num_tokens: int, namespace: Hashable = None) -> Cost:
        """As in lesson 5, less the stored blocks that another request has locked: those are free of charge.

        It should wait if a running request is just computing the first block that it would not find.
        """
        usable = self._usable(key_of(token_ids))
        found = self.tree.peek(usable, namespace)
        end = found.num_tokens * TOKEN_BYTES + self.tree.width
        should_wait = end <= len(usable) and self._is_coming(usable[:end], namespace)
        missing = super().cost(token_ids, num_tokens - found.num_tokens).num_blocks
        return Cost(missing + found.num_evictable, should_wait)

    def allocate(self, request_id: str, token_ids: Sequence[int], namespace: Hashable = None) -> int:
        """Begin a table with the stored blocks that the request begins with, and lock them in the same call.

        Args:
            namespace: requests share with those of the same namespace only.

        Returns:
            how many leading tokens already have their KV: never all, so that one is computed and gives logits.

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
        """As in lesson 5, and one more where the next token would be written into a block that others read."""
        table, missing = self.tables[request_id], super().missing_blocks(request_id, num_tokens)
        return missing + self._writes_shared(table, num_tokens) if table.may_share_last else missing

    def grow(self, request_id: str, num_tokens: int) -> array:
        """As in lesson 5. Prefixes that nobody uses make room, and a shared block is copied before it is written."""
        table = self.tables[request_id]
        if num_tokens > len(table.blocks) * self.allocator.block_size or table.may_share_last:
            self._make_free(self.missing_blocks(request_id, num_tokens))
            if self._writes_shared(table, num_tokens):
                self._copy_on_write(table)
        return super().grow(request_id, num_tokens)

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        """Put the blocks of the prompt that are full by now into the tree: from the next step on all may use them."""
        table = self.tables[request_id]
        if table.num_stored < table.num_whole:
            self.store(table, min(table.num_whole, num_computed // self.block_size))

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """As in lesson 5. What is written next may differ from what is stored, so only what stays is locked."""
        table = self.tables[request_id]
        super().truncate(request_id, num_tokens)
        table.may_share_last = True
        self._keep_locked(table, min(table.num_stored, len(table.blocks)))
        table.num_whole = min(table.num_whole, num_tokens // self.block_size)

    def free(self, request_id: str, computed_ids: Sequence[int] = ()) -> None:
        """As in lesson 5; the whole blocks of `computed_ids` stay in the tree."""
        if table := self.tables.get(request_id):
            if whole := self._storable(table, len(computed_ids) // self.block_size):
                self.tree.insert(computed_ids[: whole * self.block_size], table.blocks[:whole], table.namespace)
            self.tree.unlock(table.node)
        super().free(request_id)

    def fork(self, parent_id: str, child_id: str) -> None:
        """Let `child_id` hold the parent's blocks as well. Nothing is copied until one of them writes into one.

        Raises:
            ValueError: the child has a table already. KeyError: the parent has none. Nothing was changed.
        """
        parent = self.tables[parent_id]
        if child_id in self.tables:
            raise ValueError(f"request {child_id!r} has a block table already; fork to a new id")
        child = PrefixTable(self.allocator, parent.key, parent.namespace, parent.node)
        child.num_whole = min(parent.num_whole, parent.num_stored)  # what it computes may differ from the rest of key
        self.tree.lock(child.node)
        child.adopt(parent.blocks, parent.num_tokens)
        parent.may_share_last = child.may_share_last = True
        self.tables[child_id] = child

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """As in lesson 5, and a block that several hold is no target: the others would read what they never wrote."""
        shared = [block for block in targets if self.allocator.counts[block] > 1]
        if shared:
            raise ValueError(f"blocks {shared} are shared; copy into blocks that one request alone holds")
        super().copy_blocks(sources, targets)

    def clear(self) -> None:
        """Forget all prefixes.

        Raises:
            ValueError: a request uses one; nothing was changed.
        """
        self.tree.clear()

    def _make_free(self, num_blocks: int) -> None:
        """See to it that so many blocks are free, or raise OutOfBlocks and evict nothing."""
        if num_blocks <= self.allocator.num_free:
            return
        if num_blocks > self.num_free_blocks:
            raise OutOfBlocks(f"need {num_blocks} blocks, {self.num_free_blocks} free of {self.num_usable_blocks}")
        self.tree.evict(num_blocks - self.allocator.num_free)

    def store(self, table: PrefixTable, num_blocks: int) -> None:
        """Put the first `num_blocks` blocks into the tree. Where it has had them from somebody else, use those."""
        key = table.key[: num_blocks * self.tree.width]
        stored = self.tree.insert(key, table.blocks[:num_blocks], table.namespace, lock=True)
        self.tree.unlock(table.node)
        table.node, table.num_stored = stored.node, len(stored.blocks)
        if table.num_stored < num_blocks:  # the tree's capacity is used up: do not try again at each step
            table.num_whole = table.num_stored
        twice = [index for index, block in enumerate(stored.blocks) if table.blocks[index] != block]
        if twice:
            theirs = [stored.blocks[index] for index in twice]
            self.allocator.share(theirs)
            table.replace(twice, theirs)

    def _storable(self, table: PrefixTable, num_blocks: int) -> int:
        """How many of the first blocks may go into the tree: none from the first on that a fork uses as well, since the
        fork has not locked it."""
        for index in range(min(table.num_stored, num_blocks), num_blocks):
            if self.allocator.counts[table.blocks[index]] > 1:
                return index
        return num_blocks

    def _writes_shared(self, table: PrefixTable, num_tokens: int) -> bool:
        """Whether the token behind the last one comes into a block that others hold as well."""
        index, offset = divmod(table.num_tokens, self.block_size)
        return bool(offset) and num_tokens > table.num_tokens and self.allocator.counts[table.blocks[index]] > 1

    def _copy_on_write(self, table: PrefixTable) -> None:
        """Give the table a copy of its last block, of its own."""
        index = table.num_tokens // self.block_size
        own = self.allocator.alloc_blocks(1)
        self.copy([table.blocks[index]], own)
        table.replace([index], own)
        self._keep_locked(table, min(table.num_stored, index))

    def _keep_locked(self, table: PrefixTable, num_blocks: int) -> None:
        """Of the stored blocks that the table has locked, unlock all but the first `num_blocks`."""
        node = self.tree.match(table.key[: num_blocks * self.tree.width], table.namespace, lock=True).node
        self.tree.unlock(table.node)
        table.node, table.num_stored = node, num_blocks

    def _usable(self, key: bytes) -> bytes:
        """The whole blocks of a prompt that may come from the cache. Its last token may not: it has to be computed."""
        return key[: (len(key) - 1) // self.tree.width * self.tree.width]

    def _is_coming(self, prefix: bytes, namespace: Hashable) -> bool:
        """Whether a running request is computing the last block of `prefix`, and the tree will have it afterwards."""
        index = len(prefix) // self.tree.width - 1
        return any(
            table.is_filling(index) and table.namespace == namespace and table.key.startswith(prefix)
            for table in self.tables.values()
        )
