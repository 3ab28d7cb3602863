"""Course machinery. For lesson 20's lab: the evictor that knows the load, so that no other one finds more blocks."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from math import inf

from scripts.traces.turns import Turn, Turns

from mini_engine.kv.eviction import EvictionPolicy
from mini_engine.kv.radix_node import Node


class Oracle(EvictionPolicy):
    """Evicts the block that is found again last (Belady, 1966). now: the index of the latest turn."""

    def __init__(self, load: Sequence[Turn], turns: Turns) -> None:
        self.turns, self.now = turns, -1
        self.uses = defaultdict[str, list[int]](list)
        for index, turn in enumerate(load):
            for block in turn.blocks[:-2]:  # the answer is not looked up, and a prompt's last block never found
                self.uses[block].append(index)

    def next_use(self, block: str) -> float:
        """Return the next turn that can find a block; infinity if none can."""
        uses = self.uses[block]
        after = bisect_right(uses, self.now)
        return uses[after] if after < len(uses) else inf

    def rank(self, leaf: Node) -> tuple[float, ...]:  # type: ignore[override]
        """See `EvictionPolicy.rank`. Blocks in front of the last one are used no later."""
        return (-self.next_use(self.turns.names_of(leaf)[-1]),)

    def num_ready(self, leaf: Node) -> int:
        """See `EvictionPolicy.num_ready`: the blocks at the end that are found again as late as the last one."""
        uses = [self.next_use(block) for block in self.turns.names_of(leaf)]
        return uses.count(uses[-1])


def found_by_oracle(load: Sequence[Turn], num_blocks: int) -> int:
    """Return how many blocks of the load's prompts it finds in a pool of so many blocks."""
    turns = Turns(num_blocks, lambda turns: Oracle(load, turns))
    found = 0
    for turn in load:
        turns.policy.now += 1  # type: ignore[attr-defined]
        found += turns.take(turn)
    return found
