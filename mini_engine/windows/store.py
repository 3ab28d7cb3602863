"""Lesson 15. A store whose layers read different tables: each layer uses its group's, and a kernel with its window."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from mini_engine.attention.contract import EVERY_KEY, Batch, Kernel
from mini_engine.attention.registry import windowed
from mini_engine.kv.block_tensor import ForwardMeta, KvPool
from mini_engine.kv.direct import LayerCache
from mini_engine.kv.store_around import StoreAround
from mini_engine.model.kinds import Kind, Window
from mini_engine.windows.groups import Place, places_of


@dataclass(frozen=True)
class GroupedMeta(ForwardMeta):
    """Lesson 3's plan with a table for each of G groups. Positions and lengths are the same in all of them.

    slot_mapping: `[G, T]` int64. block_table: `[G, S, max_blocks]` int32, null blocks where there are holes.
    """


class GroupedKv(StoreAround):
    """Lesson 3's pool as a store for layers in groups.

    Args:
        layers: the kind of each layer that attends: full, or a window of the same size as the others.
        kv: a pool with as many layers as group 0.

    Attributes:
        places: each layer's. windows: the number of keys a query of each layer sees. kernels: the one that each layer
            calls.
    """

    def __init__(self, layers: Sequence[Kind], kv: KvPool) -> None:
        super().__init__(kv)
        self.direct = kv.direct
        self.places: Sequence[Place] = places_of(layers)
        self.windows = [kind.size if isinstance(kind, Window) else EVERY_KEY for kind in layers]
        kernel = cast(Kernel, self.kernel)  # an engine's pool has a Kernel, not a bare function
        with_window = windowed(kernel, min(self.windows))
        self.kernels = [kernel if window == EVERY_KEY else with_window for window in self.windows]

    def set_kv(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v `[T, H_kv, D]` into the slots of the layer's group; slot_mapping `[G, T]` int64."""
        group, index = self.places[layer]
        self.kv.set_kv(index, slot_mapping[group], k, v)

    def attend(self, layer: int, q: Tensor, meta: ForwardMeta) -> Tensor:
        """Return attention of q `[T, H_q, D]`, each sequence over its blocks in the layer's group."""
        group, index = self.places[layer]
        batch = Batch(meta.cu_seqlens_q, meta.seq_lens_kv, meta.block_table[group])
        return self.kernels[layer](q, self.kv.K[index], self.kv.V[index], batch, q.shape[-1] ** -0.5)

    def layer_caches(self, meta: ForwardMeta) -> list[LayerCache]:
        """Return the tensors of each layer, with the slots and the table of its group."""
        slots, tables, pool = list(meta.slot_mapping), list(meta.block_table), self.kv
        return [
            LayerCache(pool.K[index], pool.V[index], slots[group], tables[group], window)
            for (group, index), window in zip(self.places, self.windows, strict=True)
        ]


def with_groups(meta: ForwardMeta, tables: Sequence[Tensor]) -> GroupedMeta:
    """Add the tables of the window groups to a plan of group 0.

    Token i of a sequence is at offset `i % block_size` of block `i // block_size` in every group: only the ids differ.
    So positions, lengths and everything else come from `meta`; `slot_mapping` and `block_table` have a row per group.

    Args:
        meta: its slot_mapping is `[T]`, its block_table `[S, max_blocks]`: those of group 0.
        tables: of the groups 1, 2, …; `[S, max_blocks]` int32 each, on the same device.
    """
    index, offset = meta.positions // meta.block_size, meta.positions % meta.block_size
    owner = torch.bucketize(torch.arange(len(meta.positions), device=index.device), meta.cu_seqlens_q[1:], right=True)
    block_table = torch.stack([meta.block_table, *tables])
    slots = block_table[:, owner, index] * meta.block_size + offset
    return GroupedMeta(**dict(vars(meta), slot_mapping=slots.long(), block_table=block_table))
