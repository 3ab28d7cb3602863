"""Course machinery. Lesson 20's lab: the reader is the evictor, and plays against LRU, sessions and the oracle."""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from scripts.live.labs.events import Event
from scripts.live.labs.lab import Knob, Lab, Preset
from scripts.live.labs.load import LETTERS, load
from scripts.live.labs.oracle import found_by_oracle
from scripts.traces.tape import plural
from scripts.traces.turns import Turn, Turns

from mini_engine.agents.session import Limits
from mini_engine.agents.sessions import Sessions
from mini_engine.base.errors import UserError
from mini_engine.kv.eviction import LRU, EvictionPolicy
from mini_engine.kv.prefixes import SharedPrefix
from mini_engine.kv.radix_node import Node

EVICT = "mini_engine/kv/radix.py::RadixTree.evict"
MATCH = "mini_engine/kv/radix.py::RadixTree.match"
TREE = "mini_engine/kv/radix.py::RadixTree"
MOST_LEAVES = 9
YOU = "you"


class Reader(EvictionPolicy):
    """Evicts the leaf that the reader has chosen. Sessions are told all, so that the lab can show what they know."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self.chosen: Node | None = None

    def rank(self, leaf: Node) -> tuple[int, ...]:
        """See `EvictionPolicy.rank`."""
        return (int(leaf is not self.chosen), leaf.last_used)

    def fallen(self) -> Iterable[Node]:
        """See `EvictionPolicy.fallen`."""
        return [self.chosen] if self.chosen else []

    def began(self, prefix: SharedPrefix) -> None:
        """See `EvictionPolicy.began`."""
        self.sessions.began(prefix)

    def ended(self, prefix: SharedPrefix) -> None:
        """See `EvictionPolicy.ended`."""
        self.sessions.ended(prefix)

    def lost(self, leaf: Node, blocks: Sequence[int]) -> None:
        """See `EvictionPolicy.lost`."""
        self.sessions.lost(leaf, blocks)

    def close(self, session, namespace) -> bool:
        """See `EvictionPolicy.close`."""
        return self.sessions.close(session, namespace)


class Evictor(Lab):
    """A pool, a load, and the turns of it that have come. found: blocks of prompts, of the `asked` so far."""

    name, kind, lesson = "evictor", "agents", "l20_agents"
    title = "Be the evictor"
    prompt, example = "", ""
    invites = "Be the evictor"
    syntax = "-2 evicts leaf 2, . lets LRU choose, * lets it choose to the end"
    verbs: ClassVar = {"-": "Evict", ".": "LRU’s choice", "*": "LRU to the end"}
    knobs = (Knob("blocks", "blocks", 12, 11, 20), Knob("agents", "agents", 2, 1, 3), Knob("load", "load", 7, 1, 99))
    presets = (
        Preset("Two agents and a crowd: can you beat LRU?", "", {}),
        Preset("The same under LRU: when does an agent lose its history?", "*", {}),
        Preset("Three agents in a small pool: which ones can you keep?", "", {"agents": 3, "load": 25}),
        Preset("Two long histories: how close to Belady do you come?", "", {"load": 29, "blocks": 13}),
    )
    modules = ()
    code = (TREE, MATCH, EVICT)

    def __init__(self, chosen: dict[str, Any]) -> None:
        super().__init__(chosen, acts={YOU: "know each leaf’s age and session"})
        self.load = load(chosen["load"], chosen["agents"])
        self.turns = Turns(chosen["blocks"], lambda turns: Reader(self.sessions(turns)))
        self.seen = dict[str, Turn]()
        self.found = self.asked = self.num_done = 0
        self.went, self.news, self.scores = list[str](), list[str](), list[dict[str, Any]]()
        begins = f"{plural(len(self.load), 'turn')} will come to a pool of {chosen['blocks']} blocks."
        self.show(f"{begins} When it is full, you choose what goes.", TREE)
        self.go_on()

    @property
    def reader(self) -> Reader:
        """The reader, as the tree's policy."""
        assert isinstance(self.turns.policy, Reader)
        return self.turns.policy

    # ---------------------------------------------------------------- those to play against

    def sessions(self, turns: Turns) -> Sessions:
        """Return lesson 20's policy, with limits that this load cannot reach."""
        most = 3 * self.chosen["blocks"]
        return Sessions(Limits(most, most), clock=lambda: turns.seconds)

    def found_by(self, policy: Callable[[Turns], EvictionPolicy]) -> int:
        """Return how many blocks of the load's prompts are found under a policy."""
        turns = Turns(self.chosen["blocks"], policy)
        return sum(turns.take(turn) for turn in self.load)

    # ---------------------------------------------------------------- events

    @property
    def choices(self) -> dict[str, Node]:
        """The leaves that can go now, by their numbers in the picture; none if nothing must go."""
        if not self.turns.missing:
            return {}
        leaves = [node for node, _ in self.turns.nodes() if node.is_evictable]
        return {str(number): leaf for number, leaf in enumerate(leaves[:MOST_LEAVES], 1)}

    @property
    def alive(self) -> list[str]:
        return list(self.choices)

    def happen(self, event: Event) -> None:
        """See `Lab.happen`. The requests are the load's."""
        if event.kind in "+!":
            raise UserError(f"{event} is no event of this lab, whose requests come by themselves; {self.syntax}")
        super().happen(event)

    def leave(self, name: str) -> None:
        """Evict from the end of a leaf as much as is needed, or all of it."""
        choices = self.choices
        if name not in choices:
            options = f"choose leaf {', '.join(choices)}" if choices else "the load is over, so that nothing has to go"
            raise UserError(f"there is no leaf {name} to evict from; {options}")
        self.evict(choices[name])
        self.go_on()

    def step(self) -> None:
        """Let LRU choose."""
        if choices := self.choices:
            self.evict(min(choices.values(), key=LRU().rank))
            self.go_on()

    def evict(self, leaf: Node) -> None:
        """Evict from the end of one branch, up to where another begins, as much as is needed."""
        before = len(self.turns.gone)
        while self.turns.missing and leaf.is_evictable:
            self.reader.chosen, above = leaf, leaf.parent
            self.turns.tree.evict(min(self.turns.missing, len(leaf.blocks)))
            assert above is not None
            leaf = above
        self.reader.chosen = None
        self.went += self.turns.gone[before:]

    def go_on(self) -> None:
        """Run the load up to the reader's next choice, or to its end."""
        while self.turns.running or self.num_done < len(self.load):
            if not self.turns.running:
                self.admit(self.load[self.num_done])
            while self.turns.missing:
                if len(self.choices) > 1:
                    return self.ask_reader()
                self.evict(self.choices["1"])
            self.turns.end()
            self.num_done += 1
        return self.tell_the_end()

    def admit(self, turn: Turn) -> None:
        """Look a turn's prompt up."""
        found, asked = self.turns.begin(turn), len(turn.blocks) - 1
        self.found, self.asked = self.found + found, self.asked + asked
        if turn.name in self.seen:
            self.news.append(f"{who(turn)} found {found} of {asked} blocks. ")
        self.seen[turn.name] = turn

    # ---------------------------------------------------------------- frames

    def state(self) -> dict[str, Any]:
        turns, picks = self.turns, {leaf: number for number, leaf in self.choices.items()}
        nodes = turns.drawn()
        for drawn, (node, _) in zip(nodes, turns.nodes(), strict=True):
            drawn |= {"words": "" if node.children else self.known_of(node), "next": False, "pick": picks.get(node, "")}
        letters = LETTERS[: self.chosen["agents"]]
        return {
            "act": YOU, "seconds": turns.seconds, "nodes": nodes,
            "agents": [{"name": name, "words": self.words_of(name)} for name in letters],
            "evicted": list(self.went), "totals": [], "scores": list(self.scores),
            "choices": {number: self.known_of(leaf) for number, leaf in self.choices.items()},
            "counters": self.counters(),
        }  # fmt: skip

    def counters(self) -> dict[str, str]:
        if self.scores:
            return {score["name"]: f"{score['found']} of {score['asked']}" for score in self.scores}
        return {
            "blocks found so far": f"{self.found} of {self.asked}",
            "blocks to evict now": str(self.turns.missing),
            "turns to come": str(len(self.load) - self.num_done),
        }

    def words_of(self, name: str) -> str:
        turn = self.seen.get(name)
        if turn is None:
            return "not yet"
        if self.turns.running and self.turns.running[0] is turn:
            return "runs"
        return "closed" if turn.closes else f"idle, {self.turns.seconds - turn.seconds} s"

    def known_of(self, leaf: Node) -> str:
        """Return what a reader can know of a leaf: its session and its age."""
        return "in use" if leaf.locks else self.turns.known_of(leaf, self.reader.sessions)

    def ask_reader(self) -> None:
        """Show what can go."""
        turn, _ = self.turns.running or (self.load[0], None)
        self.show(
            f"{''.join(self.news[-2:])}{who(turn)} needs {plural(self.turns.missing, 'block')}. Which leaf goes?",
            EVICT if self.went else MATCH,
        )
        self.went, self.news = [], []

    def tell_the_end(self) -> None:
        """Show what the reader has found, and what policies find with the same load."""
        found = {YOU: self.found, "LRU": self.found_by(lambda turns: LRU())}
        found |= {"sessions": self.found_by(self.sessions), "Belady": found_by_oracle(self.load, self.chosen["blocks"])}
        self.scores = [
            {"name": name, "found": number, "asked": self.asked, "style": "held a" if name == YOU else "plain"}
            for name, number in found.items()
        ]
        rest = ", ".join(f"{name} {number}" for name, number in found.items() if name != YOU)
        self.show(
            f"{''.join(self.news[-1:])}All is over: of {self.asked} blocks you found {self.found}. {rest}.", EVICT
        )

    @property
    def fullest(self) -> int:
        """The frame to open on: the reader's next choice."""
        return len(self.frames) - 1

    @classmethod
    def scenario(cls, seed: int, length: int = 24) -> tuple[dict[str, Any], str]:
        """Return random settings, and no event: a reader plays them."""
        chance = random.Random(f"{cls.name} {seed}")
        return {knob.name: knob.any(chance) for knob in cls.knobs}, ""


def who(turn: Turn) -> str:
    return turn.name if turn.session else f"Question {turn.name}"
