"""Lesson 20. Simulates replicas behind routers: each is a real prefix cache in virtual time, and publishes its events.

    agents ── call ──▶ router ── by its policy ──▶ replica ── events, a moment later ──▶ every router's index

Lesson 13's router guesses from what it has sent. It is wrong where a replica evicts, where one loses its cache, and
where another router sends requests. Replicas and calls are those of the replay: one block of the trace is one token.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any
from zlib import crc32

from lessons.l20_agents.replay import Outcome, Rates
from lessons.l20_agents.traces import Call, Trace
from mini_engine.agents.events import EventBatch, EventLog
from mini_engine.agents.index import BlockIndex, ExactScore
from mini_engine.distributed.routing.keys import block_keys
from mini_engine.distributed.routing.policy import Policy, PrefixScore, RoundRobin
from mini_engine.kv.cache_coordinator import coordinated
from mini_engine.kv.prefix_cache import PrefixCache


@dataclass(frozen=True)
class Setting:
    """Where calls are routed.

    num_replicas, num_blocks: replicas, and blocks in the pool of each. num_routers: each call comes to any of them.
    restarts: seconds from the start of the trace at which all replicas begin to lose their caches, one after another,
        each as soon as it is idle; routers are not told. delay: seconds from an event to a router's index.
    """

    num_replicas: int = 4
    num_blocks: int = 4096
    num_routers: int = 1
    restarts: Sequence[float] = ()
    delay: float = 0.02
    beta: float = 1.0


class Router:
    """A router: a policy, the calls that it has in flight, and an index that events keep up to date."""

    def __init__(self, make: "Maker", setting: Setting) -> None:
        self.index: BlockIndex[int] = BlockIndex()
        self.policy = make(self.index, setting)
        self.in_flight: Counter[int] = Counter()

    def choose(self, keys: Sequence[bytes], num_replicas: int) -> int:
        """Return the replica for a prompt, in flight there from now on."""
        chosen = self.policy.choose(keys, {one: float(self.in_flight[one]) for one in range(num_replicas)})
        self.in_flight[chosen] += 1
        self.policy.sent(chosen, keys)
        return chosen


Maker = Callable[[BlockIndex[int], Setting], Policy[int]]
POLICIES: dict[str, Maker] = {
    "round robin": lambda index, setting: RoundRobin(),
    "guesses": lambda index, setting: PrefixScore(setting.beta, setting.num_blocks),
    "events": lambda index, setting: ExactScore(index, setting.beta),
}


class Server:
    """One replica: its manager, which is replaced when it loses its cache, and the prompts that wait."""

    def __init__(self, name: int, num_blocks: int) -> None:
        self.name, self.num_blocks, self.num_starts = name, num_blocks, 0
        self.waiting: deque[Call] = deque()
        self.is_computing = self.restarts = False
        self.start()

    def start(self) -> None:
        """Begin with an empty cache."""
        self.num_starts += 1
        self.log, self.number = EventLog(1), 0
        cache = partial(PrefixCache, watcher=self.log)
        self.manager = coordinated(self.num_blocks + 1, 1, prefixes=cache)

    def next_batch(self, now: float) -> tuple[int, EventBatch] | None:
        """Return the number and the events of the next batch; None without events."""
        events = self.log.take()
        if not events:
            return None
        self.number += 1
        return self.number - 1, EventBatch(now, events, 0, b"%d" % self.num_starts)


class RoutedReplay:
    """A run of a trace over replicas.

    Args:
        make: makes each router's policy.
    """

    def __init__(self, trace: Trace, make: Maker, setting: Setting, rates: Rates | None = None) -> None:
        self.trace, self.setting, self.rates, self.now = trace, setting, rates or Rates(), 0.0
        self.servers = [Server(name, setting.num_blocks) for name in range(setting.num_replicas)]
        self.routers = [Router(make, setting) for _ in range(setting.num_routers)]
        self.followers: dict[int, list[Call]] = defaultdict(list)
        self.coming: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self.order = count()
        self.due: dict[int, float] = {}
        self.keys: dict[int, Sequence[bytes]] = {}
        self.outcome = Outcome(trace)
        self.num_computed = [0] * setting.num_replicas

    def run(self) -> Outcome:
        """Run all calls; return what became of them."""
        for call in self.trace:
            if call.after is None:
                self.schedule(call, call.seconds)
            else:
                self.followers[call.after].append(call)
        for seconds in self.setting.restarts:
            for server in self.servers:
                self.at(seconds, self.restart, server)
        while self.coming:
            self.now, _, event, arguments = heappop(self.coming)
            event(*arguments)
        return self.outcome

    def at(self, seconds: float, event: Callable[..., object], *arguments: Any) -> None:
        heappush(self.coming, (seconds, next(self.order), event, arguments))

    def schedule(self, call: Call, seconds: float) -> None:
        self.due[call.index] = seconds
        self.at(seconds, self.arrive, call)

    def arrive(self, call: Call) -> None:
        """Send a call where its router says."""
        router = self.router_of(call)
        keys = self.keys[call.index] = block_keys(call.prompt, call.namespace, 1)
        server = self.servers[router.choose(keys, len(self.servers))]
        server.waiting.append(call)
        self.admit(server)

    def router_of(self, call: Call) -> Router:
        """Return the router that a call comes to: any, whatever its session, as behind a load balancer."""
        return self.routers[crc32(call.id.encode()) % len(self.routers)]

    def restart(self, server: Server) -> None:
        """Lose the cache as soon as no request uses it."""
        server.restarts = True
        self.admit(server)

    def admit(self, server: Server) -> None:
        """Begin the next prompt, if none is being computed and there is room for it and its answer."""
        if server.restarts and not server.manager.tables:
            server.restarts = False
            server.start()
        if server.is_computing or server.restarts or not server.waiting:
            return
        call, manager = server.waiting[0], server.manager
        num_tokens = len(call.prompt) + len(call.answer)
        if manager.cost(call.prompt, num_tokens, call.namespace).num_blocks > manager.num_free_blocks:
            return  # until a request ends
        server.waiting.popleft()
        found = manager.allocate(call.id, call.prompt, call.namespace)
        manager.grow(call.id, num_tokens)
        server.is_computing = True
        missing = len(call.prompt) - found
        self.outcome.found[call.index] = found
        self.num_computed[server.name] += missing
        self.publish(server)
        self.at(self.now + self.rates.computes(missing), self.first_token, server, call, found)

    def first_token(self, server: Server, call: Call, found: int) -> None:
        """Note that the prompt is computed, and report its cache hit to its router."""
        server.is_computing = False
        server.manager.commit(call.id, call.prompt, len(call.prompt))
        self.outcome.waited[call.index] = self.now - self.due[call.index]
        self.publish(server)
        known = self.router_of(call).policy.found, server.name, self.keys.pop(call.index), found
        self.at(self.now + self.setting.delay, *known)
        self.at(self.now + call.output_tokens / self.rates.decode, self.end, server, call)
        self.admit(server)

    def end(self, server: Server, call: Call) -> None:
        """Note that the answer is complete; its client goes on after its tool's time."""
        server.manager.free(call.id, call.text)
        self.router_of(call).in_flight[server.name] -= 1
        self.publish(server)
        for follower in self.followers.pop(call.index, ()):
            self.schedule(follower, max(follower.seconds, self.now + follower.wait))
        self.admit(server)

    def publish(self, server: Server) -> None:
        """Send what is new to every router's index."""
        if (batch := server.next_batch(self.now)) is not None:
            for router in self.routers:
                self.at(self.now + self.setting.delay, router.index.apply, server.name, *batch)

    @property
    def imbalance(self) -> float:
        """Blocks that the busiest replica has computed / the mean."""
        return max(self.num_computed) * len(self.num_computed) / max(1, sum(self.num_computed))
