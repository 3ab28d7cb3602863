"""Lesson 8. The prefix cache of a manager: KV stays after a request ends, for prompts with the same beginning.

A block is free, held by requests, or cached: only the tree holds it, and it can be evicted. A request locks the prefix
it uses in the same call that finds it. A request whose prefix is being computed in this very step should wait, and
`peek` says so: one step later the tree has it.
"""

from collections.abc import Hashable, Mapping, Sequence

from mini_engine.base.errors import OutOfBlocks
from mini_engine.kv.coordinator import CopyBlocks
from mini_engine.kv.eviction import EvictionPolicy
from mini_engine.kv.memory import NO_MEMORY, CacheMemory
from mini_engine.kv.prefixes import Found, SharedPrefix, Stored
from mini_engine.kv.radix import HitStats, RadixTree
from mini_engine.kv.radix_node import TOKEN_BYTES, key_of
from mini_engine.kv.refcount import RefCountedAllocator
from mini_engine.kv.request_table import RequestTable
from mini_engine.kv.watcher import NO_WATCHER, CacheWatcher


class PrefixCache:
    """Shares prefixes between the tables of a manager. What it notes of a table is a SharedPrefix, `table.shared`.

    Args:
        num_blocks, block_size: the manager's.
        capacity: the maximum number of blocks in the tree; None for no limit but the pool. With 0, nothing is cached.
        policy: which stored prefix is evicted first: LRU, LFU or FIFO of `eviction.py`, or one of lesson 20's.
        memory: what a request needs beside K and V, so that it can begin only where the tree has that too (lesson 11).
        allocator: of the pool, if others draw blocks from it too (lesson 15).
        watcher: told which blocks the tree stores and evicts (lesson 20).

    Attributes:
        stats: prompt tokens of all admitted requests, and how many of them were found.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        capacity: int | None = None,
        policy: EvictionPolicy | None = None,
        memory: CacheMemory = NO_MEMORY,
        allocator: RefCountedAllocator | None = None,
        watcher: CacheWatcher = NO_WATCHER,
    ) -> None:
        self.allocator = allocator or RefCountedAllocator(num_blocks, block_size)
        self.tree = RadixTree(block_size, self.allocator, capacity, policy, memory, watcher)
        self.block_size, self.memory, self.watcher = block_size, memory, watcher
        self.stats = HitStats()

    @property
    def num_evictable(self) -> int:
        """Blocks that only the tree holds, outside every request's prefix."""
        return self.tree.num_blocks - self.tree.num_protected + self.memory.num_evictable

    def peek(self, token_ids: Sequence[int], namespace: Hashable, running: Mapping[str, RequestTable]) -> Found:
        """Return the prefix that `begin` would find. Stored blocks that running requests have locked cost nothing.

        More is coming if a running request is computing the next place that this one could begin at.
        """
        key = key_of(token_ids)
        usable = self._usable(key, namespace)
        found = self.tree.peek(usable, namespace)
        num_evictable = found.num_evictable + self.memory.num_evictable_after(self.tree, usable, namespace)
        in_flight = self.tree.capacity != 0 and self._prefix_in_flight(key, namespace, found.num_tokens, running)
        return Found(found.num_tokens, num_evictable, in_flight)

    def begin(self, table: RequestTable, token_ids: Sequence[int], namespace: Hashable) -> int:
        """Begin a table with the stored blocks of the longest cached prefix, locked by the same call that finds them.

        `_usable` is the part of the prompt that may be found. `table.shared` becomes a SharedPrefix, whose `key` has
        all whole blocks of the prompt, and the table adopts the blocks and tokens of the match (`_adopt`). The lookup
        is counted in `stats`, with all prompt tokens.

        Args:
            namespace: only requests of the same namespace share blocks.

        Returns:
            how many leading tokens already have their KV: never all, so that at least one is computed and gives logits.
        """
        key = key_of(token_ids)
        match = self.tree.match(self._usable(key, namespace), namespace, lock=True)
        whole = key[: len(token_ids) // self.block_size * self.tree.width]
        table.shared = SharedPrefix(whole, namespace, match.node, len(match.blocks), len(whole) // self.tree.width)
        self._adopt(table, match.blocks, match.num_tokens)
        self.stats.count(len(token_ids), match.num_tokens)
        return match.num_tokens

    def identify(self, table: RequestTable, session: Hashable) -> None:
        """Tell the policy whose turn has begun (lesson 20). session: None if the client has not said."""
        table.shared.session = session
        self.tree.policy.began(table.shared)

    def num_known(self, table: RequestTable) -> int:
        """Return how many tokens of a table's key the tree has, even after the last place to begin at."""
        return self.tree.peek(table.shared.key, table.shared.namespace).num_tokens

    def num_shared(self, table: RequestTable, num_tokens: int) -> int:
        """Return 1 if the next token would be written into a block that has other holders."""
        return int(table.shared.may_share_last and self._writes_shared(table, num_tokens))

    def prepare(self, table: RequestTable, num_tokens: int, copy: CopyBlocks, num_beside: int = 0) -> None:
        """Evict unlocked prefixes if blocks are needed, and copy a shared block before it is written.

        Args:
            num_beside: blocks that the request takes beside those of its table.

        Raises:
            OutOfBlocks: there are too few, even so; nothing was evicted.
        """
        missing = -(-num_tokens // self.block_size) - len(table.blocks)
        if missing <= 0 and not num_beside and not table.shared.may_share_last:
            return
        self._make_free(max(0, missing) + num_beside + self.num_shared(table, num_tokens))
        if self._writes_shared(table, num_tokens):
            self._copy_on_write(table, copy)

    def commit(
        self, table: RequestTable, token_ids: Sequence[int], num_computed: int, to_the_end: bool = False
    ) -> Stored | None:
        """Store the prompt's blocks that are full by now; from the next step on, other requests find them.

        Args:
            to_the_end: also store blocks of the answer, as far as they are full.
        """
        shared, num_blocks = table.shared, num_computed // self.block_size
        if to_the_end:
            if num_blocks > shared.num_whole:  # an answer's tokens are not in `key`
                shared.key, shared.num_whole = key_of(token_ids[: num_blocks * self.block_size]), num_blocks
        elif shared.num_stored >= shared.num_whole:
            return None
        start = shared.num_stored
        if start < min(shared.num_whole, num_blocks):
            self.store(table, min(shared.num_whole, num_blocks))
        if shared.num_stored == start and not to_the_end:
            return None
        self._tell(table, start)
        return Stored(shared.key, shared.namespace, table.blocks[: shared.num_stored], start)

    def extend(self, table: RequestTable, num_tokens: int) -> None:
        """Store blocks up to `num_tokens` tokens that came back from elsewhere, and count them as found."""
        start = table.shared.num_stored
        self.store(table, num_tokens // self.block_size)
        self._tell(table, start)
        self.stats.num_hits += start == 0
        self.stats.found_tokens += num_tokens - start * self.block_size

    def truncate(self, table: RequestTable) -> None:
        """Keep locked only the blocks that remain: new tokens may differ from the stored ones."""
        shared = table.shared
        shared.may_share_last = True
        if shared.num_stored > len(table.blocks):
            self._keep_locked(table, len(table.blocks))
        shared.num_whole = min(shared.num_whole, table.num_tokens // self.block_size)

    def release(self, table: RequestTable, computed_ids: Sequence[int]) -> Stored | None:
        """Keep the whole blocks of `computed_ids` in the tree, and unlock them. Return them if any is new.

        They are unlocked even if they cannot be stored. A table whose `begin` failed has locked none.
        """
        if table.shared is None:
            return None
        shared, start = table.shared, table.shared.num_stored
        num_blocks = len(computed_ids) // self.block_size
        try:
            if num_blocks:
                shared.key = key_of(computed_ids[: num_blocks * self.block_size])
                self.store(table, num_blocks)
            self.tree.policy.ended(shared)
        finally:
            self.tree.unlock(shared.node)
        self._tell(table, start)
        return Stored(shared.key, shared.namespace, table.blocks[:num_blocks], start) if num_blocks > start else None

    def clear(self) -> None:
        """Evict all prefixes.

        Raises:
            ValueError: a request uses one of them; nothing was changed.
        """
        self.tree.clear()
        self.watcher.cleared()

    def _tell(self, table: RequestTable, start: int) -> None:
        """Tell the watcher which blocks the tree has taken from a table, from index `start` on."""
        shared = table.shared
        if shared.num_stored > start:
            self.watcher.stored(Stored(shared.key, shared.namespace, table.blocks[: shared.num_stored], start))

    def store(self, table: RequestTable, num_blocks: int) -> None:
        """Store the table's first `num_blocks` blocks, and lock them instead of those it had locked before.

        Where the tree already has the same tokens, the table switches to the tree's blocks, and its own, duplicates
        now, are freed. The path is never without a lock: the new one is taken before the old one is given up. Updates
        `node` and `num_stored` of `table.shared`, and `num_whole` if the tree has no room for all blocks.
        """
        shared = table.shared
        key = shared.key[: num_blocks * self.tree.width]
        stored = self.tree.insert(key, table.blocks[:num_blocks], shared.namespace, lock=True)
        self.tree.unlock(shared.node)
        shared.node, shared.num_stored = stored.node, len(stored.blocks)
        if shared.num_stored < num_blocks:  # the tree's capacity is used up: do not retry at every step
            shared.num_whole = shared.num_stored
        twice = [index for index, block in enumerate(stored.blocks) if table.blocks[index] != block]
        if twice:
            theirs = [stored.blocks[index] for index in twice]
            self.allocator.share(theirs)
            table.replace(twice, theirs)

    def _adopt(self, table: RequestTable, blocks: Sequence[int], num_tokens: int) -> None:
        """Begin a table with blocks that have holders already."""
        self.allocator.share(blocks)
        table.adopt(blocks, num_tokens)

    def _make_free(self, num_blocks: int) -> None:
        """Ensure `num_blocks` free blocks, evicting if necessary, or raise OutOfBlocks and evict nothing.

        What the tree holds besides its own blocks goes first, as far as no place needs it (lesson 15).
        """
        num_free = self.allocator.num_free
        if num_blocks <= num_free:
            return
        if num_blocks > num_free + self.num_evictable:
            usable = self.allocator.num_blocks - 1
            raise OutOfBlocks(f"need {num_blocks} blocks, {num_free + self.num_evictable} free of {usable}")
        self.memory.trim(num_blocks - num_free)
        while (missing := num_blocks - self.allocator.num_free) > 0 and self.tree.evict(
            -(-missing // self.memory.blocks_each)
        ):
            pass
        self.memory.evict(missing)

    def _writes_shared(self, table: RequestTable, num_tokens: int) -> bool:
        """Return True if the next token would be written into a block that has other holders."""
        index, offset = divmod(table.num_tokens, self.block_size)
        return bool(offset) and num_tokens > table.num_tokens and self.allocator.counts[table.blocks[index]] > 1

    def _copy_on_write(self, table: RequestTable, copy: CopyBlocks) -> None:
        """Replace the table's last block by a private copy."""
        index = table.num_tokens // self.block_size
        own = self.allocator.alloc_blocks(1)
        copy([table.blocks[index]], own)
        table.replace([index], own)
        self._keep_locked(table, min(table.shared.num_stored, index))

    def _keep_locked(self, table: RequestTable, num_blocks: int) -> None:
        """Keep the first `num_blocks` stored blocks of the table locked, and unlock the rest."""
        shared = table.shared
        node = self.tree.match(shared.key[: num_blocks * self.tree.width], shared.namespace, lock=True).node
        self.tree.unlock(shared.node)
        shared.node, shared.num_stored = node, num_blocks

    def _whole(self, key: bytes) -> bytes:
        """Return the whole blocks of a prompt that may be cached. Its last token is left out: it must be computed."""
        return key[: (len(key) - 1) // self.tree.width * self.tree.width]

    def _usable(self, key: bytes, namespace: Hashable) -> bytes:
        """Return the part of a prompt that may be found: its `_whole` blocks up to the last place to begin at."""
        whole = self._whole(key)
        return whole[: self.memory.last(self.tree, whole, namespace) * TOKEN_BYTES]

    def _prefix_in_flight(
        self, key: bytes, namespace: Hashable, num_found: int, running: Mapping[str, RequestTable]
    ) -> bool:
        """Return True if a running request will store a longer prefix of `key`, with a place to begin."""
        whole = self._whole(key)
        return any(
            table.shared.namespace == namespace
            and any(
                end > num_found and table.shared.begins_like(whole, end)
                for end in self.memory.coming(request_id, table, num_found)
            )
            for request_id, table in running.items()
        )
