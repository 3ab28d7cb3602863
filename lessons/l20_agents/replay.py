"""Lesson 20. Replays a trace through the real prefix cache, in virtual time and without a model.

    arrives ── waits ── admitted: allocate, grow ── prompt computed: commit ── answer done: free ──▶ the next turn

The server admits requests in the order of their arrival, if the pool has room for prompt and answer. It computes one
prompt at a time, without what is cached, and decodes meanwhile. The manager's blocks have one token each, which stands
for a block of the trace: that is 512 times faster, and evicts the same.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from lessons.l20_agents.traces import TRACE_BLOCK, Call, Trace
from mini_engine.base.errors import UserError
from mini_engine.kv.cache_coordinator import cache_of, caching_manager
from mini_engine.kv.eviction import EvictionPolicy


@dataclass(frozen=True)
class Rates:
    """A server's speed in tokens/s. prefill: of all prompts. decode: of each answer. block: tokens in an id's block."""

    prefill: float = 40_000.0
    decode: float = 60.0
    block: int = TRACE_BLOCK

    def computes(self, num_blocks: int) -> float:
        """Return the seconds that computing so many blocks of a prompt takes."""
        return num_blocks * self.block / self.prefill


@dataclass
class Outcome:
    """What became of each call of a trace, by its index. found: blocks. waited: seconds to the first token."""

    trace: Trace
    found: list[int] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.found, self.waited = [0] * len(self.trace), [0.0] * len(self.trace)

    def of(self, group: str | None) -> Iterable[Call]:
        """Return the calls of a group; all of them if it is None."""
        return [call for call in self.trace if group is None or call.group == group]

    def num_found(self, group: str | None = None) -> int:
        """Return the blocks of prompts that were cached."""
        return sum(self.found[call.index] for call in self.of(group))

    def num_asked(self, group: str | None = None) -> int:
        """Return the blocks of prompts."""
        return sum(len(call.prompt) for call in self.of(group))

    def hit_rate(self, group: str | None = None) -> float:
        """Return found / asked."""
        return self.num_found(group) / self.num_asked(group)

    def waits(self, group: str | None = None) -> list[float]:
        """Return the seconds to the first token."""
        return [self.waited[call.index] for call in self.of(group)]


class Replay:
    """A run of a trace.

    Args:
        policy: makes the policy from this replay, whose `now` is its clock.
        num_blocks: of the pool, without the null block.

    Attributes:
        now: seconds. due: the arrivals that are known, by index. begun: whether a call has been admitted, by index.
        tree: the prefix cache's tree.
    """

    def __init__(
        self,
        trace: Trace,
        policy: Callable[["Replay"], EvictionPolicy],
        num_blocks: int,
        rates: Rates | None = None,
    ) -> None:
        largest = max(len(call.text) for call in trace)
        if largest > num_blocks:
            raise UserError(f"a call of {largest} blocks does not fit into a pool of {num_blocks}; give a larger pool")
        self.trace, self.num_blocks, self.rates, self.now = trace, num_blocks, rates or Rates(), 0.0
        self.due: dict[int, float] = {}
        self.begun = bytearray(len(trace))
        self.manager = caching_manager(num_blocks + 1, 1, policy=policy(self))
        self.tree = cache_of(self.manager).prefixes.tree
        self.followers: dict[int, list[Call]] = defaultdict(list)
        self.events: list[tuple[float, int, Callable[[Call], None], Call]] = []
        self.order = count()
        self.waiting: deque[Call] = deque()
        self.is_computing = False
        self.outcome = Outcome(trace)

    def run(self) -> Outcome:
        """Run all calls; return what became of them."""
        for call in self.trace:
            if call.after is None:
                self.schedule(call, call.seconds)
            else:
                self.followers[call.after].append(call)
        while self.events:
            self.now, _, event, call = heappop(self.events)
            event(call)
            self.admit()
        self.outcome.seconds = self.now
        return self.outcome

    def schedule(self, call: Call, seconds: float) -> None:
        self.due[call.index] = seconds
        self.at(seconds, self.arrive, call)

    def arrive(self, call: Call) -> None:
        """Put the call into the queue, and tell the cache, as the engine does."""
        self.waiting.append(call)
        self.manager.coordinator.request_added(call)

    def at(self, seconds: float, event: Callable[[Call], None], call: Call) -> None:
        heappush(self.events, (seconds, next(self.order), event, call))

    def admit(self) -> None:
        """Begin the next prompt, if none is being computed and there is room for it and its answer."""
        if self.is_computing or not self.waiting:
            return
        call, manager = self.waiting[0], self.manager
        num_tokens = len(call.prompt) + len(call.answer)
        cost = manager.cost(call.prompt, num_tokens, call.namespace)
        if cost.num_blocks > manager.num_free_blocks:
            return  # until a request ends
        self.waiting.popleft()
        self.begun[call.index] = True
        found = manager.allocate(call.id, call.prompt, call.namespace)
        manager.grow(call.id, num_tokens)
        self.outcome.found[call.index] = found
        self.is_computing = True
        self.at(self.now + self.rates.computes(len(call.prompt) - found), self.first_token, call)

    def first_token(self, call: Call) -> None:
        """Note that the prompt is computed, and that its first token is there."""
        self.is_computing = False
        self.manager.commit(call.id, call.prompt, len(call.prompt))
        self.outcome.waited[call.index] = self.now - self.due[call.index]
        self.at(self.now + call.output_tokens / self.rates.decode, self.end, call)

    def end(self, call: Call) -> None:
        """Note that the answer is complete. The client goes on after its tool's time, or closes the session."""
        self.manager.free(call.id, call.text)
        if call.closes:
            self.manager.coordinator.close_session(call.session, call.namespace)
        for follower in self.followers.pop(call.index, ()):
            self.schedule(follower, max(follower.seconds, self.now + follower.wait))
