"""Course machinery. Creates an engine's pools: in this process, or in every process that shares the model.

The composition root creates pools through these methods, and the copies between them and lesson 12's tiers. Lesson
18's `SharedPools` does the same for ranks.
"""

from collections.abc import Callable
from typing import Any

from mini_engine.engine.runner import ALONE, Group
from mini_engine.kv.pool_maker import PoolMaker


class Pools:
    """Creates pools, and access to them, in a process that runs the whole model.

    group: the processes that hold the pools.
    """

    group: Group = ALONE

    def maker(self, own: PoolMaker) -> PoolMaker:
        """Return the pool maker for all processes; `own` makes the pool of this one."""
        return own

    def slots(self, states: Any) -> Any:
        """Return the TrackSlots of lesson 11's pool, which allocates slots and copies and resets their states."""
        return states

    def store(self, make: Callable[..., Any], model: Any, **pools: Any) -> Any:
        """Return `make(model, **pools)`, the store that the model reads; other processes make theirs likewise.

        Args:
            make: a module's function or a class method, so that it can be sent.
            pools: `kv`, and `states` if the model has any: this process's.
        """
        return make(model, **pools)

    def block_bytes(self, kv: Any) -> Any:
        """Return lesson 12's `Blocks` over a KV pool: whole blocks as bytes."""
        from mini_engine.tiers.blocks import BlockBytes

        return BlockBytes(*kv.parts)

    def state_bytes(self, states: Any) -> Any:
        """Return lesson 12's `Blocks` over a pool of states: whole slots as bytes."""
        from mini_engine.tiers.blocks import BlockBytes

        return BlockBytes(*states.parts)


OWN_POOLS = Pools()
