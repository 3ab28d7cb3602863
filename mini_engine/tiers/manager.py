"""Lesson 12. Lesson 8's manager with tiers behind the pool: evicted prefixes come back instead of being computed again.

A block goes to the tiers when it enters the tree, so evicting it later costs nothing, and preempting a request neither:
what it has computed is in the tree, and in a tier. A request begins with the prefix that the tree has, and goes on with
what the tiers have behind it, copied into blocks that the tree then holds.
"""

from collections.abc import Hashable, Sequence

from mini_engine.errors import OutOfBlocks
from mini_engine.kv.eviction import EvictionPolicy
from mini_engine.kv.manager import CopyBlocks, Cost
from mini_engine.kv.prefix_manager import PrefixCacheManager, PrefixTable
from mini_engine.kv.radix_node import TOKEN_BYTES, key_of
from mini_engine.tiers.store import BlockStore, Prefix


class TieredCacheManager(PrefixCacheManager):
    """A PrefixCacheManager whose prefixes survive eviction. Methods not overridden here behave as in lesson 8.

    Args:
        num_blocks, block_size, copy, capacity, policy: as in lesson 8.
        store: the tiers.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        copy: CopyBlocks,
        store: BlockStore,
        capacity: int | None = None,
        policy: EvictionPolicy | None = None,
    ) -> None:
        super().__init__(num_blocks, block_size, copy, capacity, policy)
        self.tiers = store

    def cost(self, token_ids: Sequence[int], num_tokens: int, namespace: Hashable = None) -> Cost:
        """As in lesson 8. The request should also wait while its blocks are read ahead, if others can run meanwhile."""
        cost = super().cost(token_ids, num_tokens, namespace)
        if cost.should_wait or not self.tables:
            return cost
        usable = self._usable(key_of(token_ids))
        found = self.tree.peek(usable, namespace).num_tokens // self.block_size
        wanted = self.tiers.wanted(self._prefix(usable, namespace), found)
        return cost._replace(should_wait=self.tiers.tiers.prefetch(wanted))

    def allocate(self, request_id: str, token_ids: Sequence[int], namespace: Hashable = None) -> int:
        """As in lesson 8, and go on with the blocks that the tiers have behind the cached prefix."""
        found = super().allocate(request_id, token_ids, namespace)
        prefix = self._prefix(self._usable(key_of(token_ids)), namespace)
        table = self.tables[request_id]
        start = found // self.block_size
        is_alone = len(self.tables) == 1  # no other request waits for this step
        records = self.tiers.find(self.tiers.wanted(prefix, start), read_disk=is_alone)
        stop = start + len(records)
        if not records or not self._has_room(request_id, stop * self.block_size):
            return found
        self.tiers.restore(records, table.blocks[start:stop])
        super().store(table, stop)
        self.stats.num_hits += found == 0
        self.stats.found_tokens += (stop - start) * self.block_size
        return stop * self.block_size

    def store(self, table: PrefixTable, num_blocks: int) -> None:
        """As in lesson 8, and hand the new blocks to the tiers."""
        start = table.num_stored
        super().store(table, num_blocks)
        width = self.tree.width
        self.tiers.save(self._prefix(table.key[: num_blocks * width], table.namespace), table.blocks, start)

    def free(self, request_id: str, computed_ids: Sequence[int] = ()) -> None:
        """As in lesson 8, and hand the whole blocks of `computed_ids` to the tiers."""
        if table := self.tables.get(request_id):
            whole = self._storable(table, len(computed_ids) // self.block_size)
            if whole > table.num_stored:
                key = key_of(computed_ids[: whole * self.block_size])
                self.tiers.save(self._prefix(key, table.namespace), table.blocks[:whole], table.num_stored)
        super().free(request_id, computed_ids)

    def _prefix(self, key: bytes, namespace: Hashable) -> Prefix:
        return self.tiers.prefix(key, namespace, self.block_size * TOKEN_BYTES)

    def _has_room(self, request_id: str, num_tokens: int) -> bool:
        """Grow the request's table for tokens from a tier; without room they are computed later, chunk by chunk."""
        try:
            self.grow(request_id, num_tokens)
        except OutOfBlocks:
            return False
        return True
