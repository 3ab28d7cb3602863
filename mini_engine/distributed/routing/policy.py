"""Lesson 13. Chooses the replica that answers a prompt: the one with the best score, in numbers only.

    score = matched blocks / the prompt's blocks - beta * (load - mean load) / max(1, mean load)

Two terms without a unit: the share of the prompt that need not be computed, and how much busier than the others the
replica is. After vLLM's production-stack; beta 0 is pure affinity, a large beta the least load.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from mini_engine.distributed.routing.seen import SeenBlocks

ReplicaT = TypeVar("ReplicaT", bound=Hashable)
Keys = Sequence[Hashable]


class Policy(Protocol[ReplicaT]):
    """What the simulation and Ray Serve's router ask."""

    def choose(self, keys: Keys, loads: Mapping[ReplicaT, float]) -> ReplicaT:
        """Return the replica for a prompt of these blocks. loads: of all that can take it, in one unit."""
        ...

    def sent(self, replica: ReplicaT, keys: Keys) -> None:
        """Note that the prompt went to `replica`."""
        ...

    def found(self, replica: ReplicaT, keys: Keys, num_found: int) -> None:
        """Note that the replica took `num_found` of the prompt's blocks from its cache, and has them all now."""
        ...


class PrefixScore(Generic[ReplicaT]):
    """The policy of this lesson.

    Args:
        beta: what a load of twice the mean costs, as a share of the prompt.
        capacity: blocks that a replica can hold. Better too many than too few.

    seen: what each replica is believed to have. Only `choose` makes and drops entries.
    """

    def __init__(self, beta: float = 1.0, capacity: int = 100_000) -> None:
        if beta < 0:
            raise ValueError(f"beta is {beta}; it must be 0 or more, or the busiest replica would win")
        self.beta = beta
        self.capacity = capacity
        self.seen: dict[ReplicaT, SeenBlocks] = {}

    def choose(self, keys: Keys, loads: Mapping[ReplicaT, float]) -> ReplicaT:
        """Return the replica with the best score; of equal ones the least loaded, then the one that holds least.

        Before the scores are computed, `seen` is brought up to date: it has an entry for each replica in `loads` and
        for no other. A replica without a load is gone, and empty when it comes back. The entry of a new one is
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

        The share that is known of an empty prompt is 0.
        """
        mean = sum(loads.values()) / len(loads)
        return {
            replica: self.seen[replica].matched(keys) / max(1, len(keys)) - self.beta * (load - mean) / max(1.0, mean)
            for replica, load in loads.items()
        }

    def sent(self, replica: ReplicaT, keys: Keys) -> None:
        """Note that the replica will have computed this prompt. Nothing is noted of a replica without an entry."""
        if replica in self.seen:
            self.seen[replica].add(keys)

    def found(self, replica: ReplicaT, keys: Keys, num_found: int) -> None:
        """Correct what is believed of the replica's cache by its report on a prompt, which it has now.

        First what it no longer had is forgotten, then the prompt is noted as `sent` does. A report of a replica
        without an entry changes nothing.
        """
        if replica in self.seen:
            self.seen[replica].correct(keys, num_found)
            self.seen[replica].add(keys)


class RoundRobin(Generic[ReplicaT]):
    """Each replica in its turn, whatever the prompt. What the score is compared with."""

    def __init__(self) -> None:
        self.turn = 0

    def choose(self, keys: Keys, loads: Mapping[ReplicaT, float]) -> ReplicaT:
        """Return the next replica."""
        replica = list(loads)[self.turn % len(loads)]
        self.turn += 1
        return replica

    def sent(self, replica: ReplicaT, keys: Keys) -> None:
        """Nothing to remember."""

    def found(self, replica: ReplicaT, keys: Keys, num_found: int) -> None:
        """Nothing to correct."""
