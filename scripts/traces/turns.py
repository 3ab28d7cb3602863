"""Course machinery. For lesson 20's recorder and lab: agents' turns and one-off questions on the engine's own cache.

A text is a list of named blocks: S is the system prompt of all, A2 the second block of agent A's history, 3a the first
of question 3. A block's tokens are its name's number, so that equal names are equal text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from scripts.traces.sharing import below, ids_of
from scripts.traces.tape import listed

from mini_engine.agents.sessions import Sessions
from mini_engine.engine.request import Request
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.kv.cache_coordinator import cache_of, coordinated
from mini_engine.kv.eviction import EvictionPolicy
from mini_engine.kv.prefix_cache import PrefixCache
from mini_engine.kv.radix_node import Node
from mini_engine.kv.watcher import CacheWatcher

BLOCK_SIZE = 16
SHARED = "S"


@dataclass(frozen=True)
class Turn:
    """One request.

    seconds: when it comes. name: an agent's letter or a question's number. blocks: its whole text, the answer last.
    session: what its client says it belongs to; None for a question. closes: its client closes the session then.
    """

    seconds: int
    name: str
    blocks: tuple[str, ...]
    session: str | None = None
    closes: bool = False


class Turns(CacheWatcher):
    """Runs turns one at a time on the manager of an engine. policy: makes its eviction policy from these turns.

    seconds: the time, which is the latest turn's. gone: names of the blocks evicted since it began, in that order.
    """

    def __init__(self, num_blocks: int, policy: Callable[["Turns"], EvictionPolicy]) -> None:
        self.seconds, self.gone = 0, list[str]()
        self.numbers, self.used = dict[str, int](), dict[int, int]()
        self.policy = policy(self)
        cache = partial(PrefixCache, policy=self.policy, watcher=self)
        self.manager = coordinated(num_blocks + 1, BLOCK_SIZE, prefixes=cache)
        self.tree = cache_of(self.manager).prefixes.tree
        self.running: tuple[Turn, Request] | None = None

    def ids(self, blocks: Sequence[str]) -> list[int]:
        """Return the tokens of named blocks."""
        numbers = [self.numbers.setdefault(block, len(self.numbers) + 1) for block in blocks]
        return [number for number in numbers for _ in range(BLOCK_SIZE)]

    def names_of(self, node: Node) -> list[str]:
        """Return the names of a node's blocks."""
        names = list(self.numbers)
        return [names[number - 1] for number in ids_of(node)[::BLOCK_SIZE]]

    def begin(self, turn: Turn) -> int:
        """Admit a turn's prompt, which locks the prefix that is found. Return that prefix's number of blocks."""
        self.seconds, self.gone = turn.seconds, []
        request = Request(turn.name, self.ids(turn.blocks[:-1]), SamplingParams(), session=turn.session)
        self.running = turn, request
        self.manager.coordinator.request_added(request)
        found = self.manager.allocate(turn.name, request.token_ids)
        self._date()
        return found // BLOCK_SIZE

    @property
    def missing(self) -> int:
        """How many blocks must be evicted before the running turn has room."""
        if self.running is None:
            return 0
        turn, _ = self.running
        needed = self.manager.missing_blocks(turn.name, len(turn.blocks) * BLOCK_SIZE)
        return max(0, needed - self.manager.allocator.num_free)

    def end(self) -> None:
        """Compute the running turn's prompt and answer, evicting what must go, and keep its blocks."""
        assert self.running is not None
        (turn, _), self.running = self.running, None
        ids = self.ids(turn.blocks)
        self.manager.grow(turn.name, len(ids))
        self.manager.free(turn.name, ids)
        if turn.closes:
            self.manager.coordinator.close_session(turn.session, None)
        self._date()

    def take(self, turn: Turn) -> int:
        """Run a whole turn. Return how many blocks of its prompt were found."""
        found = self.begin(turn)
        self.end()
        return found

    def removed(self, blocks: Sequence[int]) -> None:
        """See `CacheWatcher.removed`."""
        names = {
            block: name
            for node, _ in self.nodes()
            for block, name in zip(node.blocks, self.names_of(node), strict=True)
        }
        self.gone += [names[block] for block in blocks]

    def nodes(self) -> list[tuple[Node, int]]:
        """Return the nodes below the root, each with the first block of its parent; 0 for the root."""
        return list(below(self.tree.root))

    @property
    def leaves(self) -> list[Node]:
        """The leaves that can be evicted, the first to go first."""
        return sorted((node for node, _ in self.nodes() if node.is_evictable), key=self.policy.rank)

    def age(self, node: Node) -> int:
        """Return how many seconds ago a node was used."""
        return self.seconds - self.used[node.last_used]

    def known_of(self, leaf: Node, sessions: Sessions | None) -> str:
        """Return what a policy knows of a leaf, in words. sessions: None for one that knows its age alone."""
        ago = f"{self.age(leaf)} s ago"
        if sessions is None:
            return f"used {ago}"
        if ends := sessions.ends.get(leaf):
            return f"{listed([str(session.key[1]) for session in ends])}’s session, {ago}"
        return f"left behind, {ago}" if sessions.left.get(leaf) == leaf.last_used else f"no session, {ago}"

    def _date(self) -> None:
        for node, _ in self.nodes():
            self.used.setdefault(node.last_used, self.seconds)

    def drawn(self) -> list[dict[str, Any]]:
        """Return the tree for a frame: the names of each node's blocks, and its parent's first one, "" for the root."""
        first = {0: ""} | {node.blocks[0]: self.names_of(node)[0] for node, _ in self.nodes()}
        return [{"blocks": self.names_of(node), "parent": first[parent]} for node, parent in self.nodes()]
