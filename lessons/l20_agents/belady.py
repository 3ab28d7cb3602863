"""Lesson 20. The oracle: an eviction policy that knows the future, and so what no policy can beat.

Belady, 1966: evict what is used again last. In a tree only leaves can be evicted, and that is no restriction: a call
that uses a text uses all texts that it begins with, so a node is never used later than those below it. Where all blocks
cost the same and the order of calls is given, no policy finds more blocks. Where a slow server delays calls, the order
itself depends on the policy. Then this one knows when each agent that waits for its tool comes back, and takes the
trace's order for calls that have no time yet.
"""

from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import inf

from lessons.l20_agents.replay import Replay
from lessons.l20_agents.traces import Trace
from mini_engine.kv.eviction import EvictionPolicy
from mini_engine.kv.radix_node import Node


class Belady(EvictionPolicy):
    """Evicts the leaf whose text is used again last.

    Args:
        uses: for each id, the calls that could find it, in order.
        begun: which calls have begun, by index; those use nothing again.
        due: when calls arrive, by index, as far as that is known. The others come later, in their order.
    """

    def __init__(self, uses: Mapping[int, list[int]], begun: Sequence[int], due: Mapping[int, float]) -> None:
        self.uses, self.begun, self.due = uses, begun, due

    def rank(self, leaf: Node) -> tuple[float, ...]:  # type: ignore[override]
        """See `EvictionPolicy.rank`. An id stands for all text before it, so that a leaf's last id is enough."""
        return tuple(-part for part in self.next_use(ids_of(leaf)[-1]))

    def num_ready(self, leaf: Node) -> int:
        """See `EvictionPolicy.num_ready`: the ids at the leaf's end that are used again at the same time."""
        ids = ids_of(leaf)
        last = self.next_use(ids[-1])
        return next((number for number, one in enumerate(reversed(ids)) if self.next_use(one) != last), len(ids))

    def next_use(self, block: int) -> tuple[float, float]:
        """Return the time of an id's next use, and the call's index; infinity if there is none."""
        coming = [index for index in self.uses.get(block, ()) if not self.begun[index]]
        return min(((self.due.get(index, inf), index) for index in coming), default=(inf, inf))


def ids_of(leaf: Node) -> array:
    """Return the ids of a leaf's blocks, in order: each has one token."""
    return array("I", bytes(leaf.key))


def uses_of(trace: Trace) -> dict[int, list[int]]:
    """Return the indices of the calls that could find each id: a prompt's last one is always computed."""
    uses: dict[int, list[int]] = defaultdict(list)
    for call in trace:
        for block in call.prompt[:-1]:
            uses[block].append(call.index)
    return uses


def belady(replay: Replay) -> Belady:
    """Return the oracle for a replay."""
    return Belady(uses_of(replay.trace), replay.begun, replay.due)
