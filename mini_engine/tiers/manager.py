"""Lesson 12. Lesson 8's manager with tiers behind the pool: evicted prefixes come back instead of being computed again.

A block goes to the tiers when it enters the tree, so evicting it later costs nothing, and preempting a request neither:
what it has computed is in the tree, and in a tier. A request begins with the prefix that the tree has, and goes on with
what the tiers have behind it, copied into blocks that the tree then holds.
"""

from collections.abc import Hashable, Sequence

from mini_engine.errors import OutOfBlocks
from mini_engine.kv.manager import Cost
from mini_engine.kv.prefix_manager import PrefixCacheManager, PrefixTable
from mini_engine.kv.radix_node import TOKEN_BYTES, key_of
from mini_engine.tiers.records import Record, Wanted
from mini_engine.tiers.store import BlockStore, Prefix


class TieredCacheManager(PrefixCacheManager):
    """A PrefixCacheManager whose prefixes survive eviction. Methods not overridden here behave as in lesson 8.

    Args:
        arguments, options: as for the class that comes next, lesson 8's manager here.
        block_store: the tiers.
    """

    def __init__(self, *arguments, block_store: BlockStore, **options) -> None:
        super().__init__(*arguments, **options)
        self.block_store = block_store

    def cost(self, token_ids: Sequence[int], num_tokens: int, namespace: Hashable = None) -> Cost:
        """As in lesson 8. The request should also wait while its blocks are read ahead, if others can run meanwhile."""
        cost = super().cost(token_ids, num_tokens, namespace)
        if cost.should_wait or not self.tables:
            return cost
        key = key_of(token_ids)
        found = self._num_found(self._usable(key), namespace)
        wanted = self._wanted(self._prefix(key, namespace), found // self.block_size, len(token_ids))
        return cost._replace(should_wait=self.block_store.tiers.prefetch(wanted))

    def allocate(self, request_id: str, token_ids: Sequence[int], namespace: Hashable = None) -> int:
        """As in lesson 8, and go on with the blocks that the tiers have behind the cached prefix."""
        found = super().allocate(request_id, token_ids, namespace)
        prefix = self._prefix(key_of(token_ids), namespace)
        wanted = self._wanted(prefix, found // self.block_size, len(token_ids))
        is_alone = len(self.tables) == 1  # no other request waits for this step
        records = self.block_store.find(wanted, read_disk=is_alone)
        restored = self._restore(request_id, found, wanted, records)
        if restored > found:
            self.stats.num_hits += found == 0
            self.stats.found_tokens += restored - found
        return restored

    def store(self, table: PrefixTable, num_blocks: int) -> None:
        """As in lesson 8, and hand the new blocks to the tiers."""
        start = table.num_stored
        super().store(table, num_blocks)
        self.block_store.save(self._prefix(table.key, table.namespace), table.blocks[:num_blocks], start)

    def free(self, request_id: str, computed_ids: Sequence[int] = ()) -> None:
        """As in lesson 8, and hand the whole blocks of `computed_ids` to the tiers."""
        if table := self.tables.get(request_id):
            whole = self._storable(table, len(computed_ids) // self.block_size)
            if whole > table.num_stored:
                prefix = self._prefix(key_of(computed_ids[: whole * self.block_size]), table.namespace)
                self.block_store.save(prefix, table.blocks[:whole], table.num_stored)
        super().free(request_id, computed_ids)

    def _prefix(self, key: bytes, namespace: Hashable) -> Prefix:
        return self.block_store.prefix(key, namespace, self.block_size * TOKEN_BYTES)

    def _num_found(self, usable: bytes, namespace: Hashable) -> int:
        """Return how many tokens `allocate` would find in the tree."""
        return self.tree.peek(usable, namespace).num_tokens

    def _wanted(self, prefix: Prefix, start: int, num_tokens: int) -> list[Wanted]:
        """Return what to ask the tiers for behind block `start`. The last token is left out: it must be computed."""
        stop = min(len(prefix), (num_tokens - 1) // self.block_size)
        return self.block_store.wanted(prefix, start, stop)

    def _restore(self, request_id: str, found: int, wanted: Sequence[Wanted], records: Sequence[Record]) -> int:
        """Put the records that were found behind the request's first `found` tokens. Return how many tokens it has."""
        table, start = self.tables[request_id], found // self.block_size
        stop = start + len(records)
        if not records or not self._has_room(request_id, stop * self.block_size):
            return found
        self.block_store.restore(records, table.blocks[start:stop])
        super().store(table, stop)
        return stop * self.block_size

    def _has_room(self, request_id: str, num_tokens: int) -> bool:
        """Grow the request's table for tokens from a tier; without room they are computed later, chunk by chunk."""
        try:
            self.grow(request_id, num_tokens)
        except OutOfBlocks:
            return False
        return True
