"""Lesson 13. Simulates replicas: the cache and the load of each, and when a prompt's first token arrives.

A replica computes prompts one after another at its prefill rate, and decodes at the same time; a block found in its
cache costs nothing. So a hit shortens the wait of every prompt queued behind it. Without rates, time stands still:
load is the number of blocks computed so far.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from mini_engine.distributed.routing.policy import Policy
from mini_engine.kv.radix import RadixTree

Keys = Sequence[int]


@dataclass(frozen=True)
class Arrival:
    """One request. seconds: its arrival. keys: of its prompt's blocks. output_tokens: the length of its answer."""

    seconds: float
    keys: Keys
    output_tokens: int = 0


@dataclass(frozen=True)
class Rates:
    """A replica's speed. prefill: blocks/s. decode: tokens/s of one answer."""

    prefill: float
    decode: float


@dataclass
class Served:
    """The outcome of one request. replica: its index. waited: seconds to the first token."""

    replica: int
    num_found: int
    num_computed: int
    waited: float


@dataclass
class SimulatedReplica:
    """A simulated machine. capacity: blocks in its pool. rates: None for a replica without time."""

    capacity: int
    rates: Rates | None = None
    num_computed: int = 0
    free_at: float = 0.0
    ends: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree = RadixTree(1, None, self.capacity)

    def load(self, now: float) -> float:
        """Return the number of unfinished requests at `now`; without rates, the blocks computed so far.

        A request whose answer ends exactly at `now` is finished. `now` never goes back.
        """
        if self.rates is None:
            return float(self.num_computed)
        while self.ends and self.ends[0] <= now:
            heapq.heappop(self.ends)
        return float(len(self.ends))

    def serve(self, index: int, request: Arrival) -> Served:
        """Take a request: find its prefix in the tree, insert its prompt, and compute the blocks not found.

        The last block is always computed: it yields the first token's logits. Prompts are computed one after
        another: this one begins at its arrival or at `free_at`, when the previous one is complete, whichever is later.
        Its first token comes when it is complete itself, and the answer takes output_tokens / decode rate from then on;
        its end is pushed onto the heap `ends`. `waited` counts from the arrival; without rates it is 0.
        """
        found = self.tree.match(request.keys[:-1]).num_tokens
        self.tree.insert(request.keys, request.keys)
        computed = len(request.keys) - found
        self.num_computed += computed
        if self.rates is None:
            return Served(index, found, computed, 0.0)
        self.free_at = max(self.free_at, request.seconds) + computed / self.rates.prefill
        heapq.heappush(self.ends, self.free_at + request.output_tokens / self.rates.decode)
        return Served(index, found, computed, self.free_at - request.seconds)


def simulate(
    requests: Sequence[Arrival], policy: Policy[int], num_replicas: int, capacity: int, rates: Rates | None = None
) -> list[Served]:
    """Send every request to the replica that `policy` chooses, and report the request and its cache hit to the policy.

    requests: by time. The policy knows the replicas by their index, and their loads at each request's arrival.
    capacity: blocks in each replica's pool. Returns the outcome of each request, in order.
    """
    replicas = [SimulatedReplica(capacity, rates) for _ in range(num_replicas)]
    served = []
    for request in requests:
        loads = {index: replica.load(request.seconds) for index, replica in enumerate(replicas)}
        chosen = policy.choose(request.keys, loads)
        one = replicas[chosen].serve(chosen, request)
        policy.sent(chosen, request.keys)
        policy.found(chosen, request.keys, one.num_found)
        served.append(one)
    return served
