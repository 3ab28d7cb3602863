"""Lesson 13. A router's books besides its policy: requests in flight, and how much of each report it has read.

Numbers only, without Ray: `router.py` connects it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Generic

from mini_engine.distributed.routing.policy import Keys, Policy, PrefixScore, ReplicaT, RoundRobin

POLICIES = ("score", "round-robin")


def make_policy(name: str, beta: float, capacity: int) -> Policy[Any]:
    """Return a new policy by its name in `POLICIES`. capacity: blocks in each replica's pool."""
    return {"score": lambda: PrefixScore(beta, capacity), "round-robin": RoundRobin}[name]()


class Routing(Generic[ReplicaT]):
    """A policy with its loads: a replica's is its requests in flight, counted from the moment it was chosen.

    Requests that arrive together are chosen for before the first of them has reached its replica, so counting later
    would send all of them to one.
    """

    def __init__(self, policy: Policy[ReplicaT]) -> None:
        self.policy = policy
        self.in_flight: dict[str, ReplicaT] = {}
        self.read: dict[ReplicaT, int] = {}

    def choose(self, request: str, keys: Keys, replicas: Sequence[ReplicaT]) -> ReplicaT:
        """Choose a replica for a request, which counts as in flight there; again if Ray could not send it."""
        self.in_flight.pop(request, None)
        counts = Counter(self.in_flight.values())
        chosen = self.policy.choose(keys, {replica: float(counts[replica]) for replica in replicas})
        self.in_flight[request] = chosen
        return chosen

    def sent(self, request: str, keys: Keys, replica: ReplicaT) -> None:
        """Note that a replica has taken the request."""
        if request in self.in_flight:
            self.policy.sent(replica, keys)

    def ended(self, request: str) -> None:
        """Note that a request is no longer in flight."""
        self.in_flight.pop(request, None)

    def learn(self, replica: ReplicaT, reports: Iterable[tuple[int, Keys, int]]) -> None:
        """Correct the policy by a replica's latest reports. Those that were read before are skipped by their number."""
        for number, keys, num_found in reports:
            if number > self.read.get(replica, 0):
                self.policy.found(replica, keys, num_found)
                self.read[replica] = number
