"""Course machinery. Where an engine's pools are: in this process, or in every process that shares the model.

The composition root makes pools, and copies between them and lesson 12's tiers, by way of these methods. Lesson
18's `SharedPools` has the same ones for ranks.
"""

from typing import Any, Protocol

from mini_engine.engine.runner import ALONE, Group
from mini_engine.kv.pool_maker import PoolMaker


class Pools(Protocol):
    """Makes pools."""

    @property
    def group(self) -> Group:
        """The processes that have them."""
        ...

    def maker(self, own: PoolMaker) -> PoolMaker:
        """Return what makes the KV pools of all processes; `own` makes this one's."""
        ...

    def slots(self, states: Any) -> Any:
        """Return what hands out the slots of lesson 11's pool, and copies and resets their states: a TrackSlots."""
        ...

    def block_bytes(self, kv: Any) -> Any:
        """Return lesson 12's `Blocks` of a KV pool: whole blocks as bytes."""
        ...

    def state_bytes(self, states: Any) -> Any:
        """Return lesson 12's `Slots` of a pool of states: whole slots as bytes."""
        ...


class OwnPools:
    """The pools of a process that has the whole model."""

    group: Group = ALONE

    def maker(self, own: PoolMaker) -> PoolMaker:
        """Return `own`."""
        return own

    def slots(self, states: Any) -> Any:
        """Return the pool itself."""
        return states

    def block_bytes(self, kv: Any) -> Any:
        """Return the pool's BlockBytes."""
        from mini_engine.tiers.blocks import BlockBytes

        return BlockBytes.of_pool(kv)

    def state_bytes(self, states: Any) -> Any:
        """Return the pool's StateBytes."""
        from mini_engine.tiers.blocks import StateBytes

        return StateBytes(states)


OWN_POOLS = OwnPools()
