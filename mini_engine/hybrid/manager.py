"""Lesson 11. Lesson 8's manager for requests that need blocks and a state slot.

A state cannot be shared while it changes, and cannot be taken back to an earlier token. So a request gets a copy of the
deepest checkpoint in its prefix, and its chunks end where a checkpoint is worth having: there the state is copied into
the tree. Those places are

    every `checkpoint_interval` tokens,
    the last whole block of a prompt, before its last token, so that the same prompt finds it,
    and where a prompt was seen to leave a stored prefix, because the next one will leave it there too.
"""

from collections.abc import Hashable, Sequence

from mini_engine.errors import OutOfBlocks, UserError
from mini_engine.hybrid.radix import CheckpointTree
from mini_engine.hybrid.track_slots import TrackSlots
from mini_engine.kv.eviction import EvictionPolicy
from mini_engine.kv.manager import CopyBlocks, Cost, KvCacheManager, no_store
from mini_engine.kv.prefix_manager import PrefixCacheManager, PrefixTable
from mini_engine.kv.radix_node import TOKEN_BYTES, Node, key_of
from mini_engine.kv.refcount import RefCountedAllocator


class StateTable(PrefixTable):
    """A request's block table and its state.

    slot: its working slot. num_computed: the tokens that its state has seen.
    ends: where its prompt should be checkpointed besides every interval, ascending.
    """

    def __init__(self, allocator: RefCountedAllocator, key: bytes, namespace: Hashable, node: Node, slot: int) -> None:
        super().__init__(allocator, key, namespace, node)
        self.slot = slot
        self.num_computed = 0
        self.ends: list[int] = []


class HybridCacheManager(PrefixCacheManager):
    """A PrefixCacheManager that also hands out state slots. Methods not overridden here behave as in lesson 8.

    Args:
        states: the pool of states: its numbers alone, or a GdnPool.
        checkpoint_interval: tokens between two checkpoints of a text; a multiple of the block size.
            Without checkpoint slots nothing is ever shared.

    Attributes:
        free_slots: working slots that no request holds; the last one is handed out next.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        copy: CopyBlocks = no_store,
        *,
        states: TrackSlots,
        checkpoint_interval: int = 256,
        policy: EvictionPolicy | None = None,
    ) -> None:
        if checkpoint_interval < block_size or checkpoint_interval % block_size:
            raise UserError(
                f"checkpoint_interval is {checkpoint_interval}; give a multiple of the block size, {block_size}: a "
                "state is found only where a block ends"
            )
        super().__init__(num_blocks, block_size, copy)
        self.states = states
        self.interval = checkpoint_interval
        capacity = None if states.max_track_slots else 0  # K and V that no state leads to would never be found
        self.tree: CheckpointTree = CheckpointTree(states, block_size, self.allocator, capacity, policy)
        self.tables: dict[str, StateTable] = {}
        self.free_slots = list(range(states.max_reqs, 0, -1))

    def slot_of(self, request_id: str) -> int:
        """Return the working slot of a request that has a table."""
        return self.tables[request_id].slot

    def cost(self, token_ids: Sequence[int], num_tokens: int, namespace: Hashable = None) -> Cost:
        """As in lesson 8, up to the deepest checkpoint.

        The request should wait while every state slot is taken, or while a running request is on its way to a
        checkpoint that this one could start from.
        """
        usable = self._usable(key_of(token_ids))
        found = self.tree.peek_state(usable, namespace)
        missing = KvCacheManager.cost(self, token_ids, num_tokens - found.num_tokens).num_blocks
        should_wait = not self.free_slots or self._state_is_coming(usable, found.num_tokens, namespace)
        return Cost(missing + found.num_evictable, should_wait)

    def allocate(self, request_id: str, token_ids: Sequence[int], namespace: Hashable = None) -> int:
        """Begin a table with the blocks of the deepest checkpoint, and a slot with a copy of its state, or with zeros.

        As in lesson 8, the checkpoint's node stays locked, and the lookup is counted in `stats`. The table's `ends`
        are those of `_ends`.

        Returns:
            how many leading tokens the state has seen and the blocks hold.

        Raises:
            OutOfBlocks: no state slot is free. ValueError: the request has a table. Nothing was changed.
        """
        if request_id in self.tables:
            raise ValueError(f"request {request_id!r} has a block table already; free it or grow it")
        self._check_slot()
        key = key_of(token_ids)
        found = self.tree.match_state(self._usable(key), namespace)
        whole = key[: len(token_ids) // self.block_size * self.tree.width]
        table = StateTable(self.allocator, whole, namespace, found.match.node, self.free_slots.pop())
        table.adopt(found.match.blocks, found.match.num_tokens)
        self._begin_state(table.slot, found.slot)
        table.num_computed = found.match.num_tokens
        table.ends = self._ends(len(token_ids), found.match.num_tokens, found.num_stored)
        self.stats.count(len(token_ids), found.match.num_tokens)
        self.tables[request_id] = table
        return found.match.num_tokens

    def chunk_end(self, request_id: str, start: int, stop: int) -> int:
        """Return where a chunk from `start` to at most `stop` ends: at the first place to checkpoint, or at `stop`."""
        if not self.states.max_track_slots:
            return stop
        table = self.tables[request_id]
        boundary = (start // self.interval + 1) * self.interval
        return min([stop, boundary, *(end for end in table.ends if end > start)])

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        """As in lesson 8; and if the chunk ended at a place to checkpoint, copy the state into the tree."""
        table = self.tables[request_id]
        table.num_computed = num_computed
        worth = num_computed in table.ends or num_computed % self.interval == 0
        if worth:
            self._include(table, token_ids, num_computed)
        super().commit(request_id, token_ids, num_computed)
        if worth and table.num_stored * self.block_size == num_computed:
            slot = self.tree.new_checkpoint(table.node)
            if slot is not None:
                self.states.copy_states(table.slot, slot)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """As in lesson 8, but a state cannot forget a token that it has seen.

        Raises:
            ValueError: fewer tokens than have been computed; nothing was changed.
        """
        table = self.tables[request_id]
        if num_tokens < table.num_computed:
            raise ValueError(
                f"cannot keep {num_tokens} of {table.num_computed} computed tokens: a recurrent state cannot be rolled "
                "back; free the request and compute it again"
            )
        super().truncate(request_id, num_tokens)

    def free(self, request_id: str, computed_ids: Sequence[int] = ()) -> None:
        """As in lesson 8, and the state slot is zeroed and free again."""
        table = self.tables.get(request_id)
        super().free(request_id, computed_ids)
        if table:
            self.states.reset_states([table.slot])
            self.free_slots.append(table.slot)

    def fork(self, parent_id: str, child_id: str) -> None:
        """Share the parent's blocks with `child_id`, as in lesson 8, and copy its state into a slot of the child's own.

        Raises:
            OutOfBlocks: no state slot is free. ValueError: the child has a table. KeyError: the parent has none.
                Nothing was changed.
        """
        parent = self.tables[parent_id]
        if child_id in self.tables:
            raise ValueError(f"request {child_id!r} has a block table already; fork to a new id")
        self._check_slot()
        child = StateTable(self.allocator, parent.key, parent.namespace, parent.node, self.free_slots.pop())
        child.num_whole = min(parent.num_whole, parent.num_stored)  # its own tokens may differ from the rest of key
        child.num_computed = parent.num_computed
        self.tree.lock(child.node)
        child.adopt(parent.blocks, parent.num_tokens)
        parent.may_share_last = child.may_share_last = True
        self.states.copy_states(parent.slot, child.slot)
        self.tables[child_id] = child

    def _check_slot(self) -> None:
        if not self.free_slots:
            raise OutOfBlocks(f"need 1 state slot, 0 free of {self.states.max_reqs}")

    def _begin_state(self, slot: int, checkpoint: int | None) -> None:
        """Set a slot to a copy of a checkpoint, or to zeros."""
        if checkpoint is None:
            self.states.reset_states([slot])
        else:
            self.states.copy_states(checkpoint, slot)

    def _ends(self, num_tokens: int, num_found: int, num_stored: int) -> list[int]:
        """Return where a prompt is checkpointed: where it leaves what is stored, and at its last usable block."""
        last = (num_tokens - 1) // self.block_size * self.block_size
        return sorted({end for end in (num_stored, last) if end > num_found})

    def _include(self, table: StateTable, token_ids: Sequence[int], num_tokens: int) -> None:
        """Extend the part of the table that the tree is to store: an answer's tokens are not in `key`."""
        num_blocks = num_tokens // self.block_size
        if num_blocks > table.num_whole and self._storable(table, num_blocks) == num_blocks:
            table.key, table.num_whole = key_of(token_ids[:num_tokens]), num_blocks

    def _state_is_coming(self, usable: bytes, num_found: int, namespace: Hashable) -> bool:
        """Whether a running request will checkpoint a longer prefix of `usable` than the one found."""
        return any(
            table.namespace == namespace
            and any(self._leads_to(table, usable, end) for end in self._coming_ends(table) if end > num_found)
            for table in self.tables.values()
        )

    def _coming_ends(self, table: StateTable) -> list[int]:
        """Return where the request's prompt will still be checkpointed."""
        if not self.states.max_track_slots:
            return []
        first = (table.num_computed // self.interval + 1) * self.interval
        whole = len(table.key) // TOKEN_BYTES
        return [*range(first, whole + 1, self.interval), *(end for end in table.ends if end > table.num_computed)]

    @staticmethod
    def _leads_to(table: StateTable, usable: bytes, end: int) -> bool:
        """Whether `usable` is the same as the table's prompt for its first `end` tokens."""
        size = end * TOKEN_BYTES
        return size <= len(usable) and usable[:size] == table.key[:size]
