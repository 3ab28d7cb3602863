"""Course machinery. The storage of an engine: the pool that the model reads and everything that goes with it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mini_engine.engine.pools import Pools
from mini_engine.engine.runner import Plan, plan_rows
from mini_engine.kv.block_tensor import KvPool
from mini_engine.kv.coordinator import CopyBlocks, KvCoordinator


def no_slots(request_id: str) -> Sequence[int]:
    """Return an empty sequence: the request has no state."""
    return ()


@dataclass(frozen=True)
class Storage:
    """The memories of a model with K and V alone; other models have more (lesson 11).

    store: read and written by the model. kv: its blocks. copy: copies blocks, in every process of the model.
    plan: plans a step over it. probe: plans a step without a request, to measure a step's time.
    coordinator: creates the manager's coordinator; one that caches also takes a connector.
    states: the pool of states, if the model has any. slots_of: names a request's slots in it.
    windows: the memory of windows, lesson 15's, if the model has any.
    """

    store: Any
    kv: KvPool
    copy: CopyBlocks
    plan: Plan = plan_rows
    probe: Plan = plan_rows
    coordinator: Callable[..., KvCoordinator] = KvCoordinator
    states: Any = None
    slots_of: Callable[[str], Sequence[int]] = no_slots
    windows: Any = None

    def companions(self, pools: Pools, blocks: Any) -> list[Any]:
        """Return lesson 12's companions: what a stored prefix needs besides `blocks`, whole blocks as bytes."""
        found: list[Any] = []
        if self.states is not None:
            from mini_engine.tiers.states import StateCompanion

            found.append(StateCompanion(pools.state_bytes(self.states), self.slots_of))
        if self.windows is not None:
            from mini_engine.windows.companion import WindowCompanion

            found.append(WindowCompanion(blocks, self.windows))
        return found


def plain_storage(kv: KvPool, copy: CopyBlocks, enable_prefix_caching: bool) -> Storage:
    """Return the storage of a model with K and V alone."""
    if not enable_prefix_caching:
        return Storage(kv, kv, copy)
    from mini_engine.kv.cache_coordinator import CacheCoordinator  # without prefix caching, lesson 8 is not needed

    return Storage(kv, kv, copy, coordinator=CacheCoordinator)
