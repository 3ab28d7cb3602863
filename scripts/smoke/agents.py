"""Lesson 20. For its smoke script: agents that come back when their tools have run, and a crowd that comes between."""

from collections.abc import Iterable, Sequence
from typing import Any

from scripts.smoke.arguments import blocks_for
from scripts.smoke.run import Outcome
from scripts.smoke.scenarios import Scenario

from mini_engine.agents.sessions import Sessions
from mini_engine.engine.engine import Engine
from mini_engine.engine.request import Request
from mini_engine.kv.cache_coordinator import CacheCoordinator, cache_of

TURNS = 3
MOST_IN_CROWD = 60  # requests


class Agents(Scenario):
    """Agents with a common beginning, one for each prompt, and a crowd of requests without a session.

    Attributes:
        texts: each agent's next prompt: what it has asked, was answered, and what its tools have returned.
        missing: what a scenario was meant to show and has not, a sentence each.
    """

    texts: list[list[int]]

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.missing: list[str] = []

    def prepare(self, **options: Any) -> None:
        """Make an engine whose pool has room for all that the agents will have said, in the half that may be held."""
        self.texts = [self.rotated(0, 5 * self.args.block_size) + ids for ids in self.prompts]
        turn = max(map(len, self.prompts)) + self.args.max_new_tokens
        needs = blocks_for([text + [0] * turn * (TURNS - 1) for text in self.texts], self.args)
        num_blocks = 2 * sum(needs)
        sizes = {"num_blocks": 1 + num_blocks, "max_track_slots": 2 * len(self.prompts)}
        options = sizes | {"enable_sessions": True} | options
        self.shared = self.engine(**options)
        if (each := self.cache.memory.blocks_each) > 1:  # windows take blocks of the same pool
            self.shared = self.engine(**options | {"num_blocks": 1 + each * num_blocks})

    def rotated(self, start: int, length: int) -> list[int]:
        """Return a text made from all prompts, beginning with their token `start`."""
        tokens = [token for ids in self.prompts for token in ids]
        start %= len(tokens)
        return ((tokens[start:] + tokens[:start]) * length)[:length]

    @property
    def cache(self) -> CacheCoordinator:
        """The engine's cache."""
        return cache_of(self.shared.scheduler.manager)

    @property
    def sessions(self) -> Sessions:
        """The policy of an engine with sessions."""
        policy = self.cache.prefixes.tree.policy
        assert isinstance(policy, Sessions)
        return policy

    def begin(self, agents: Iterable[int]) -> list[Request]:
        """Add a request for the next turn of each of these agents."""
        requests = []
        for agent in agents:
            self.session = f"agent {agent}"
            requests += self.add(self.shared, [self.texts[agent]])
        self.session = None
        return requests

    def turn(self, agents: Sequence[int] | None = None, preempt: bool = False) -> list[Request]:
        """Answer a turn of these agents together, of all by default. Each tool returns its agent's prompt again."""
        agents = range(len(self.texts)) if agents is None else agents
        requests = self.begin(agents)
        self.run_out(self.shared, preempt)
        for agent, request in zip(agents, requests, strict=True):
            self.texts[agent] = request.token_ids + self.prompts[agent]
        return requests

    def crowd(self, together: int = 1, num_blocks: int = 8) -> None:
        """Answer prompts of so many blocks without a session until a pool of blocks has been evicted."""
        tree, start, self.evicts = self.cache.prefixes.tree, 0, True
        enough = tree.num_evicted + self.shared.scheduler.manager.num_usable_blocks
        while tree.num_evicted < enough and start < MOST_IN_CROWD:
            start += together
            length = num_blocks * self.args.block_size
            self.ask(self.shared, [self.rotated(start - one, length) for one in range(together)])

    def num_cached(self, texts: Sequence[list[int]] | None = None) -> list[int]:
        """Return how many tokens of each text the cache has, by default of each agent's next prompt."""
        return [self.cache.prefixes.peek(ids, None, {}).num_tokens for ids in texts or self.texts]

    def shows(self, has_happened: object, otherwise: str) -> None:
        """Note `otherwise` as not exercised unless it has happened."""
        self.missing += [] if has_happened else [otherwise]

    def outcome(self, engine: Engine, requests: Sequence[Request]) -> Outcome:
        """Add what was not shown."""
        done = super().outcome(engine, requests)
        done.not_exercised += self.missing
        return done
