"""Lesson 12. Lesson 11's manager with tiers: K and V come back together with the state at their end, or not at all.

A state checkpoint is a record of its own kind, saved when it is made. What the tiers have behind the tree's deepest
checkpoint is useful as far as their own deepest one.
"""

from collections.abc import Hashable, Sequence

from mini_engine.hybrid.manager import HybridCacheManager, StateTable
from mini_engine.kv.prefix_manager import PrefixCacheManager
from mini_engine.tiers.manager import TieredCacheManager
from mini_engine.tiers.records import Record, Wanted
from mini_engine.tiers.states import StateBytes, state_key, state_record, wanted_state
from mini_engine.tiers.store import Prefix


class TieredHybridManager(TieredCacheManager, HybridCacheManager):
    """A HybridCacheManager whose prefixes survive eviction. Methods not overridden here behave as in lesson 11.

    Args:
        state_bytes: copies states.
    """

    def __init__(self, *arguments, state_bytes: StateBytes, **options) -> None:
        super().__init__(*arguments, **options)
        self.state_bytes = state_bytes

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        """As in lesson 11; and if a checkpoint was made, hand its state to the tiers."""
        super().commit(request_id, token_ids, num_computed)
        table = self.tables[request_id]
        if table.num_stored * self.block_size != num_computed or table.node not in self.tree.checkpoints:
            return
        prefix, last = self._prefix(table.key, table.namespace), table.num_stored - 1
        tiers = self.block_store.tiers
        if 0 <= last < len(prefix) and state_key(prefix.keys[last + 1]) not in tiers.host:
            tiers.put(state_record(prefix, last, self.state_bytes.read(table.slot)))

    def _num_found(self, usable: bytes, namespace: Hashable) -> int:
        return self.tree.peek_state(usable, namespace).num_tokens

    def _wanted(self, prefix: Prefix, start: int, num_tokens: int) -> list[Wanted]:
        """Return the blocks behind block `start` up to the deepest state that the tiers have, and that state."""
        blocks = super()._wanted(prefix, start, num_tokens)
        tiers = self.block_store.tiers
        for index in range(start + len(blocks) - 1, start - 1, -1):
            if state_key(prefix.keys[index + 1]) in tiers:
                state = wanted_state(prefix, index, self.state_bytes.payload_bytes)
                return [*blocks[: index + 1 - start], state]
        return []

    def _restore(self, request_id: str, found: int, wanted: Sequence[Wanted], records: Sequence[Record]) -> int:
        """As for blocks alone, but all of them are needed: K and V without the state at their end are no use."""
        if not wanted or len(records) < len(wanted):
            return found
        table, start = self.tables[request_id], found // self.block_size
        *blocks, state = records
        stop = start + len(blocks)
        if not self._has_room(request_id, stop * self.block_size):
            return found
        self.block_store.restore(blocks, table.blocks[start:stop])
        self.state_bytes.write(table.slot, state.payload)
        PrefixCacheManager.store(self, table, stop)
        self._continue_at(table, stop * self.block_size)
        return stop * self.block_size

    def _continue_at(self, table: StateTable, num_tokens: int) -> None:
        """Let a table whose state has just come back go on from there, and keep the state as a checkpoint again."""
        table.num_computed = num_tokens
        table.ends = [end for end in table.ends if end > num_tokens]
        if table.num_stored * self.block_size == num_tokens:
            slot = self.tree.new_checkpoint(table.node)
            if slot is not None:
                self.states.copy_states(table.slot, slot)
