"""Lesson 13. Chooses the replica that answers a prompt, by score. Pure arithmetic, no I/O.

    score = matched blocks / the prompt's blocks - beta * (load - mean load) / max(1, mean load)

Both terms are ratios: the share of the prompt that need not be computed, and how much busier than average the replica
is. After vLLM's production-stack; beta 0 is pure affinity, a large beta means least loaded.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from mini_engine.distributed.routing.seen import SeenBlocks

ReplicaT = TypeVar("ReplicaT", bound=Hashable)
Keys = Sequence[Hashable]


class Policy(Protocol[ReplicaT]):
    """The interface between a policy and its callers, the simulation and Ray Serve's router."""

    def choose(self, keys: Keys, loads: Mapping[ReplicaT, float]) -> ReplicaT:
        """Return the replica for a prompt of these blocks. loads: of all replicas that can take it, in any one unit."""
        ...

    def sent(self, replica: ReplicaT, keys: Keys) -> None:
        """Note that the prompt went to `replica`."""

    def found(self, replica: ReplicaT, keys: Keys, num_found: int) -> None:
        """Note that the replica found `num_found` of the prompt's blocks in its cache, and now has all of them."""


class PrefixScore(Generic[ReplicaT]):
    """The policy of this lesson.

    Args:
        beta: the penalty for a load of twice the mean, as a share of the prompt.
        capacity: blocks that a replica can hold. Overestimate rather than underestimate.

    seen: the estimate of each replica's cache. Only `choose` creates and drops entries.
    """

    def __init__(self, beta: float = 1.0, capacity: int = 100_000) -> None:
        if beta < 0:
            raise ValueError(f"beta is {beta}; it must be 0 or more, or the busiest replica would win")
        self.beta = beta
        self.capacity = capacity
        self.seen: dict[ReplicaT, SeenBlocks] = {}

    def choose(self, keys: Keys, loads: Mapping[ReplicaT, float]) -> ReplicaT:
        """Return the replica with the best score; ties go to the least loaded, then to the one with the fewest blocks.

        Before the scores are computed, `seen` is brought up to date: it has an entry for each replica in `loads` and
        for no other. A replica without a load is gone, and empty if it comes back. The entry of a new one is
        `SeenBlocks(capacity)`.

        Raises:
            ValueError: `loads` is empty; `seen` stays as it is.
        """
        if not loads:
            raise ValueError("there is no replica to choose from")
        known = self.seen
        self.seen = {one: known[one] if one in known else SeenBlocks(self.capacity) for one in loads}
        scores = self.scores(keys, loads)
        return max(loads, key=lambda replica: (scores[replica], -loads[replica], -len(self.seen[replica])))

    def scores(self, keys: Keys, loads: Mapping[ReplicaT, float]) -> dict[ReplicaT, float]:
        """Return the score of each replica in `loads`; all of them have an entry in `seen`.

        The matched share of an empty prompt is 0.
        """
        mean = sum(loads.values()) / len(loads)
        return {
            replica: self.seen[replica].matched(keys) / max(1, len(keys)) - self.beta * (load - mean) / max(1.0, mean)
            for replica, load in loads.items()
        }

    def sent(self, replica: ReplicaT, keys: Keys) -> None:
        """Note that the replica will have computed this prompt. Replicas without an entry are ignored."""
        if replica in self.seen:
            self.seen[replica].add(keys)

    def found(self, replica: ReplicaT, keys: Keys, num_found: int) -> None:
        """Update the estimate of the replica's cache from its hit report.

        First forgets the blocks that it no longer had, then notes the prompt as in `sent`. Reports of replicas without
        an entry are ignored.
        """
        if replica in self.seen:
            self.seen[replica].correct(keys, num_found)
            self.seen[replica].add(keys)


class RoundRobin(Policy[ReplicaT]):
    """Takes the replicas in turn, whatever the prompt: the baseline for the score."""

    def __init__(self) -> None:
        self.turn = 0

    def choose(self, keys: Keys, loads: Mapping[ReplicaT, float]) -> ReplicaT:
        """Return the next replica."""
        replica = list(loads)[self.turn % len(loads)]
        self.turn += 1
        return replica
