"""Lesson 13. A router's state in addition to its policy: requests in flight, and how far it has read each report.

Numbers only, without Ray: `router.py` connects it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Generic

from mini_engine.distributed.routing.policy import Keys, Policy, PrefixScore, ReplicaT, RoundRobin


def make_policy(name: str, beta: float, capacity: int) -> Policy[Any]:
    """Return a new policy by its name, score or round-robin. capacity: blocks in each replica's pool."""
    return {"score": lambda: PrefixScore(beta, capacity), "round-robin": RoundRobin}[name]()


class Routing(Generic[ReplicaT]):
    """A policy with its loads: a replica's is its requests in flight, counted from the moment it was chosen.

    Requests that arrive together are all routed before the first one has reached its replica; counting later would
    send all of them to the same one.
    """

    def __init__(self, policy: Policy[ReplicaT]) -> None:
        self.policy = policy
        self.in_flight: dict[str, ReplicaT] = {}
        self.read: dict[ReplicaT, int] = {}

    def choose(self, request: str, keys: Keys, replicas: Sequence[ReplicaT]) -> ReplicaT:
        """Choose a replica for a request, in flight there from now on. Call again if Ray could not send it."""
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
        """Correct the policy with a replica's latest reports, skipping those already read, by number."""
        for number, keys, num_found in reports:
            if number > self.read.get(replica, 0):
                self.policy.found(replica, keys, num_found)
                self.read[replica] = number
