"""Course machinery. The storage of an engine: the pool that the model reads and everything that goes with it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mini_engine.assembly.pools import Pools
from mini_engine.engine.runner import Plan, Step, plan_rows
from mini_engine.engine.scheduler import Chunk
from mini_engine.kv.block_tensor import KvPool
from mini_engine.kv.coordinator import CopyBlocks, KvCoordinator

if TYPE_CHECKING:  # lesson 8's, which an engine without prefix caching does without
    from mini_engine.kv.memory import CacheMemory

Addition = Callable[[Any, Sequence[Chunk]], Any]  # returns a plan with more tables, for a plan and its chunks


@dataclass(frozen=True)
class MemoryKind:
    """Everything that a kind of layer brings to an engine if it keeps more, or less, than K and V of every token.

    memory: what requests and the prefix cache hold of it; None: nothing beside the blocks of group 0.
    plan: adds its tables to the plan of a step. probe: the same for a step without a request.
    rows: returns lesson 10's `Extras` of captured steps.
    companion: returns lesson 12's `Companion`, from the pools and the copier of whole blocks; None without a memory.
    """

    memory: "CacheMemory | None"
    plan: Addition
    probe: Addition
    rows: Callable[[], Any]
    companion: Callable[[Pools, Any], Any] | None


@dataclass(frozen=True)
class Storage:
    """The memories of a model with K and V alone; other models have more.

    store: read and written by the model. kv: its blocks. copy: copies blocks, in every process of the model.
    coordinator: creates the manager's coordinator; one that caches also takes a connector.
    kinds: what layers bring that keep something else; each adds to the plan of those before it.
    """

    store: Any
    kv: KvPool
    copy: CopyBlocks
    coordinator: Callable[..., KvCoordinator] = KvCoordinator
    kinds: Sequence[MemoryKind] = ()

    def companions(self, pools: Pools, blocks: Any) -> list[Any]:
        """Return lesson 12's companions: what a stored prefix needs besides `blocks`, whole blocks as bytes."""
        return [kind.companion(pools, blocks) for kind in self.kinds if kind.companion]

    @property
    def plan(self) -> Plan:
        """Plans a step: lesson 5's plan, and what each kind adds."""
        return planner([kind.plan for kind in self.kinds])

    @property
    def probe(self) -> Plan:
        """Plans a step without a request, to measure its time."""
        return planner([kind.probe for kind in self.kinds])


def planner(additions: Sequence[Addition]) -> Plan:
    """Return a planner of steps: lesson 5's, with these additions, one after another."""

    def plan(chunks: Sequence[Chunk], block_size: int, device: torch.device) -> Step:
        step = plan_rows(chunks, block_size, device)
        for add in additions:
            step = step._replace(meta=add(step.meta, chunks))
        return step

    return plan if additions else plan_rows
