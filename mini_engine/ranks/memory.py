"""Lesson 18. The memory of a rank other than rank 0: its shares of the pools, which follow rank 0's orders."""

from typing import Any

from mini_engine.engine.layout import state_pool, store_of
from mini_engine.kv.block_tensor import KvPool


class Memory:
    """A rank's pools.

    Args:
        model: the rank's share of the model.

    Attributes:
        kv: its share of lesson 3's pool. states: its share of lesson 11's, if the model has states.
        store: the store that its model reads and writes.
    """

    kv: KvPool
    states: Any
    store: Any = None

    def __init__(self, model: Any) -> None:
        self.model = model

    def take_kv(self, kv: KvPool) -> None:
        """Use this KV pool from now on, wrapped in a store if the model needs one."""
        self.kv, self.store = kv, store_of(self.model, kv)

    def make_states(self, max_reqs: int, max_track_slots: int) -> None:
        """Create a pool of states to go with the KV pool."""
        self.states = state_pool(self.model, max_reqs, max_track_slots)
        self.store = store_of(self.model, self.kv, self.states)

    def block_bytes(self) -> Any:
        """Return this rank's part of whole blocks as bytes."""
        from mini_engine.tiers.blocks import BlockBytes

        return BlockBytes.of_pool(self.kv)

    def state_bytes(self) -> Any:
        """Return this rank's part of whole state slots as bytes."""
        from mini_engine.tiers.blocks import StateBytes

        return StateBytes(self.states)
