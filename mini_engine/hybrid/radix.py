"""Lesson 11. Lesson 8's tree with checkpoints: a node may carry the state at its end.

    root ── [system prompt, 6 blocks] ●─┬─ [question A, 2 blocks] ●
                                        └─ [question B, 3 blocks]          ● has a checkpoint

K and V of a prefix are useful from its first block on; a state only where its node ends. So a match is as long as the
deepest node with both. A node without a checkpoint stays useful: its blocks belong to what lies below it.

No request reads a checkpoint while it runs, it copies it. So any checkpoint may be evicted at any time, and is before
any block: the least recently used first.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from mini_engine.hybrid.track_slots import TrackSlots
from mini_engine.kv.eviction import EvictionPolicy
from mini_engine.kv.radix import BlockHolder, RadixTree
from mini_engine.kv.radix_node import TOKEN_BYTES, Match, Node, Peek, key_of


class StateMatch(NamedTuple):
    """What a request can start from.

    match: the path to the deepest node with K, V and a checkpoint.
    slot: the checkpoint's slot, or None at the root, where every text begins with a state of zeros.
    num_stored: tokens of the prompt whose K and V the tree has, `match.num_tokens` or more.
    """

    match: Match
    slot: int | None
    num_stored: int


class CheckpointTree(RadixTree):
    """A RadixTree whose nodes may carry a checkpoint.

    Attributes:
        checkpoints: node -> slot in `states`, the least recently used first.
        num_states_evicted: checkpoints evicted so far.
    """

    def __init__(
        self,
        states: TrackSlots,
        block_size: int = 16,
        holder: BlockHolder | None = None,
        capacity: int | None = None,
        policy: EvictionPolicy | None = None,
    ) -> None:
        super().__init__(block_size, holder, capacity, policy)
        self.states = states
        self.checkpoints: dict[Node, int] = {}
        self.num_states_evicted = 0

    def match_state(self, token_ids: Sequence[int] | bytes, namespace: Hashable = None) -> StateMatch:
        """Find the deepest checkpoint within `token_ids`, lock the path to it, and mark both as used now.

        The caller copies the state before anything else can evict it, and unlocks the node when it is done.
        """
        key = key_of(token_ids)
        with self.mutex:
            node, num_stored = self._deepest(key, namespace)
            if node in self.checkpoints:
                self.checkpoints[node] = self.checkpoints.pop(node)  # now the most recently used
            for part in node.path():
                part.num_hits += 1
            self.lock(node)
            match = self._use(node)
            self.stats.count(len(key) // TOKEN_BYTES, match.num_tokens)
            return StateMatch(match, self.checkpoints.get(node), num_stored)

    def peek_state(self, token_ids: Sequence[int] | bytes, namespace: Hashable = None) -> Peek:
        """Return what `match_state` would find, without counting or marking anything as used."""
        with self.mutex:
            node, _ = self._deepest(key_of(token_ids), namespace)
            path = list(node.path())
            num_tokens = sum(len(part.blocks) for part in path) * self.block_size
            return Peek(num_tokens, sum(len(part.blocks) for part in path if not part.locks))

    def new_checkpoint(self, node: Node) -> int | None:
        """Give a node a checkpoint, evicting the least recently used one if no slot is free.

        A node that has one keeps it; it counts as used now. An evicted one is counted in `num_states_evicted`.

        Returns:
            the slot to copy the state at the node's end into; None if the node has one, or no slot is free.
        """
        with self.mutex:
            if node in self.checkpoints:
                self.checkpoints[node] = self.checkpoints.pop(node)
                return None
            slot = self.states.alloc_track_slot()
            if slot is None and self.checkpoints:
                self.drop_checkpoint(next(iter(self.checkpoints)))
                self.num_states_evicted += 1
                slot = self.states.alloc_track_slot()
            if slot is not None:
                self.checkpoints[node] = slot
            return slot

    def drop_checkpoint(self, node: Node) -> None:
        """Free a node's checkpoint, if it has one. The node and its blocks stay."""
        if (slot := self.checkpoints.pop(node, None)) is not None:
            self.states.free_track_slot(slot)

    def _deepest(self, key: bytes, namespace: Hashable) -> tuple[Node, int]:
        """Return the deepest node with a checkpoint, or the root, and how many tokens of `key` are stored."""
        node, depth, _, common = self._walk(key, namespace)
        usable = next((part for part in node.path() if part in self.checkpoints), self.root)
        return usable, (depth + common) * self.block_size

    def _cut(self, leaf: Node, num_blocks: int) -> list[int]:
        """As in lesson 8. A leaf that loses blocks ends elsewhere, so its checkpoint goes first."""
        self.drop_checkpoint(leaf)
        return super()._cut(leaf, num_blocks)
