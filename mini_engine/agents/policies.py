"""Lesson 20. Two eviction policies that know more than when a prefix was used last.

    SLRU    whether it was ever used again: what was not is on probation, and goes first
    TLRU    how long a turn may wait: the end of a conversation that can be computed again in that time goes first

SLRU: Karedla et al., 1994; SGLang's threshold. Tail-optimised LRU: Zhang et al., arXiv 2510.15152.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mini_engine.base.errors import UserError
from mini_engine.kv.eviction import EvictionPolicy
from mini_engine.kv.prefixes import SharedPrefix
from mini_engine.kv.radix_node import Node


class SLRU(EvictionPolicy):
    """Segmented LRU: prefixes found fewer than `threshold` times go first; LRU within each of the two segments."""

    def __init__(self, threshold: int = 2) -> None:
        if threshold < 1:
            raise UserError(f"threshold is {threshold}; give 1 or more hits, or every prefix is protected at once")
        self.threshold = threshold

    def rank(self, leaf: Node) -> tuple[int, ...]:
        """Return a sort key: leaves found fewer than `threshold` times (`num_hits`) first, LRU within each segment.

        See `EvictionPolicy.rank`. A prefix never loses its protection: `num_hits` does not fall.
        """
        return (int(leaf.num_hits >= self.threshold), leaf.last_used)


@dataclass
class History:
    """A conversation, in blocks: `length` when its latest turn ended, of which the tree has the first `cached`."""

    length: int
    cached: int


class TLRU(EvictionPolicy):
    """Tail-optimised LRU: of each conversation, what its next turn can compute within a budget goes first.

    A next turn that adds `next_blocks` to a conversation of `length` blocks computes at most `budget` if the first
    `length + next_blocks - budget` are cached. All behind them is safe to evict: LRU among these, then among the rest.

    Args:
        budget: blocks that a turn may compute without being late.
        next_blocks: how many a turn is expected to add.

    Attributes:
        histories: the node where a conversation's cached part ends -> its History.
    """

    def __init__(self, budget: int, next_blocks: int = 0) -> None:
        if budget < 0 or next_blocks < 0:
            raise UserError(f"budget is {budget} and next_blocks {next_blocks}; give 0 or more blocks")
        self.budget, self.next_blocks = budget, next_blocks
        self.histories: dict[Node, History] = {}

    def num_safe(self, leaf: Node) -> int:
        """Return how many blocks at the leaf's end its conversation's next turn can compute without being late.

        Never more than the leaf has; 0 if no conversation ends here, or if it has lost as much as it can spare.
        """
        history = self.histories.get(leaf)
        if history is None:
            return 0
        needed = max(0, history.length + self.next_blocks - self.budget)
        return min(len(leaf.blocks), max(0, history.cached - needed))

    def rank(self, leaf: Node) -> tuple[int, ...]:
        """See `EvictionPolicy.rank`."""
        return (int(not self.num_safe(leaf)), leaf.last_used)

    def num_ready(self, leaf: Node) -> int:
        """See `EvictionPolicy.num_ready`: a leaf's safe end goes by itself."""
        return self.num_safe(leaf) or len(leaf.blocks)

    def ended(self, prefix: SharedPrefix) -> None:
        """See `EvictionPolicy.ended`: a conversation is as long as its latest turn's text."""
        if prefix.node.parent is not None:
            self.histories[prefix.node] = History(prefix.num_stored, prefix.num_stored)

    def lost(self, leaf: Node, blocks: Sequence[int]) -> None:
        """See `EvictionPolicy.lost`. A conversation that has lost a whole leaf ends at the node above."""
        history = self.histories.get(leaf)
        if history is None:
            return
        history.cached -= len(blocks)
        if len(blocks) == len(leaf.blocks):
            del self.histories[leaf]
            above = leaf.parent
            if history.cached > 0 and above is not None:
                self.histories[above] = max(history, self.histories.get(above, history), key=lambda one: one.length)
