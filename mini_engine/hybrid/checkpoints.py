"""Lesson 11. Checkpoints: copies of states that nodes of lesson 8's tree carry, each the state at its node's end.

    root ── [system prompt, 6 blocks] ●─┬─ [question A, 2 blocks] ●
                                        └─ [question B, 3 blocks]          ● has a checkpoint

K and V of a prefix are useful from its first block on; a state only where its node ends. So a request begins at the
deepest node with both. A node without a checkpoint stays useful: its blocks belong to what lies below it.

No request reads a checkpoint while it runs, it copies it. So any checkpoint may be evicted at any time, and is before
any block: the least recently used first.
"""

from collections.abc import Iterable

from mini_engine.hybrid.track_slots import TrackSlots
from mini_engine.kv.radix_node import Node


class Checkpoints:
    """The checkpoints of a tree's nodes.

    Args:
        states: the pool of states: its numbers alone, or a GdnPool.

    Attributes:
        slots: node -> slot in `states`, the least recently used first.
        num_evicted: checkpoints evicted so far.
    """

    def __init__(self, states: TrackSlots) -> None:
        self.states = states
        self.slots: dict[Node, int] = {}
        self.num_evicted = 0

    def __contains__(self, node: Node) -> bool:
        return node in self.slots

    def use(self, node: Node) -> int | None:
        """Return the slot of a node's checkpoint, which counts as used now; None if it has none."""
        slot = self.slots.pop(node, None)
        if slot is not None:
            self.slots[node] = slot
        return slot

    def new_checkpoint(self, node: Node) -> int | None:
        """Give a node a checkpoint, evicting the least recently used one if no slot is free.

        A node that has one keeps it; it counts as used now. An evicted one is counted in `num_evicted`.

        Returns:
            the slot to copy the state at the node's end into; None if the node has one, or no slot is free.
        """
        if self.use(node) is not None:
            return None
        slot = self.states.alloc_track_slot()
        if slot is None and self.slots:
            self.drop(next(iter(self.slots)))
            self.num_evicted += 1
            slot = self.states.alloc_track_slot()
        if slot is not None:
            self.slots[node] = slot
        return slot

    def use_nearest(self, ends: Iterable[Node]) -> None:
        """Let the deepest checkpoint of each of these texts, which end at nodes, count as used now."""
        for end in ends:
            next((node for node in end.path() if self.use(node) is not None), None)

    def drop(self, node: Node) -> None:
        """Free a node's checkpoint, if it has one. The node and its blocks stay."""
        if (slot := self.slots.pop(node, None)) is not None:
            self.states.free_track_slot(slot)
