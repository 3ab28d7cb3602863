"""Course machinery. Lesson 20's trace: agents wait for tools while a crowd passes, under LRU and under sessions."""

from collections.abc import Callable
from typing import Any

from scripts.traces.tape import Tape, ask, listed, plural
from scripts.traces.turns import SHARED, Turn, Turns

from mini_engine.agents.session import Limits
from mini_engine.agents.sessions import Sessions
from mini_engine.kv.eviction import LRU, EvictionPolicy
from mini_engine.kv.radix_node import Node

NUM_BLOCKS = 11
ACTS = {"LRU": "knows each leaf’s age", "sessions": "know each leaf’s age and session"}
LRU_RANK = "mini_engine/kv/eviction.py::EvictionPolicy.rank"
SESSIONS = "mini_engine/agents/sessions.py::Sessions"
MATCH = "mini_engine/kv/radix.py::RadixTree.match"
OLD, SUMMARY = ("B1", "B2", "B3", "B4"), ("b1", "b2")  # B's history, and what it makes of that


def agent(seconds: int, name: str, *blocks: str) -> Turn:
    """Return a turn of an agent, whose session has its name."""
    return Turn(seconds, name, (SHARED, *blocks), name)


def question(seconds: int, number: int) -> Turn:
    """Return a one-off question and its answer, a block each."""
    return Turn(seconds, str(number), (SHARED, f"{number}a", f"{number}b"))


FIRST = (
    agent(0, "A", "A1", "A2"),
    agent(1, "B", *OLD[:2]),
    agent(2, "A", "A1", "A2", "A3", "A4"),
    agent(3, "B", *OLD),
)
AGAIN = agent(10, "A", *(f"A{number}" for number in range(1, 7)))
DOCUMENT = Turn(17, "D", (SHARED, *(f"D{number}" for number in range(1, 10))))


class Agents(Tape):
    """Two agents and a crowd, first under LRU, then under sessions. waits: since when each agent waits for its tool."""

    def __init__(self) -> None:
        scene = {"acts": ACTS}
        title = "A crowd passes while agents wait"
        super().__init__("l20-agents", "l20_agents/agents.trace.js", "agents", title, 10, **scene)
        self.totals: dict[str, str] = {}

    # ---------------------------------------------------------------- frames

    def state(self) -> dict[str, Any]:
        turns, next_one = self.turns, next(iter(self.turns.leaves), None)
        nodes = turns.drawn()
        for drawn, (node, _) in zip(nodes, turns.nodes(), strict=True):
            is_leaf = not node.children
            drawn |= {"words": self.known_of(node) if is_leaf else "", "next": node is next_one, "pick": ""}
        agents = [{"name": name, "words": self.words_of(name)} for name in "AB"]
        totals = [f"{name}: {self.totals.get(name, '–')}" for name in ACTS]
        return {
            "act": self.act, "seconds": turns.seconds, "agents": agents, "nodes": nodes, "evicted": list(turns.gone),
            "totals": totals, "scores": [],
        }  # fmt: skip

    def words_of(self, name: str) -> str:
        if name in self.closed:
            return "closed"
        return f"its tool runs, {self.turns.seconds - self.waits[name]} s"

    def known_of(self, leaf: Node) -> str:
        """Return what the policy knows of a leaf."""
        policy = self.turns.policy
        return self.turns.known_of(leaf, policy if isinstance(policy, Sessions) else None)

    # ---------------------------------------------------------------- the story

    def record(self) -> None:
        """Let the same crowd pass under both policies; then compact, close, and run out of everything else."""
        self.begin("LRU", lambda turns: LRU())
        self.show("Two agents have run two turns. Both wait for a tool, and no request holds their blocks.", MATCH)
        self.crowd(1, "Question 1 comes, is answered and leaves two blocks. They fit beside the agents’.")
        self.crowd(
            2, "Question 2 needs two blocks, and none is free. The least recently used are A’s.", self.about_lru()
        )
        self.crowd(3, "Question 3 evicts the rest of A. The questions’ leaves stay: they are younger.")
        self.comes_back("A’s tool is done, and A finds the system prompt alone: {again} computed again.")
        self.begin("sessions", lambda turns: Sessions(Limits(NUM_BLOCKS, NUM_BLOCKS), clock=lambda: turns.seconds))
        self.show(
            "The same again, but now requests name their session, and each end has an owner.", f"{SESSIONS}.ended"
        )
        self.crowd(1, "No session refers to question 1’s leaf: it is next to go, though it is the youngest.")
        self.crowd(2, "Question 2 takes its place. The agents’ leaves are older, and stay.", self.about_crowd())
        self.crowd(3, "Question 3 takes the place of question 2: the crowd evicts itself.")
        self.comes_back("A’s tool is done, and A finds all of its history: {again} computed again.")
        self.compacts()
        self.closes()
        self.last_resort()

    def begin(self, act: str, policy: Callable[[Turns], EvictionPolicy]) -> None:
        """Begin an act: an empty cache, and each agent's first two turns."""
        self.act, self.turns = act, Turns(NUM_BLOCKS, policy)
        self.waits, self.closed = dict[str, int](), set[str]()
        for turn in FIRST:
            self.take(turn)

    def take(self, turn: Turn) -> int:
        found = self.turns.take(turn)
        if turn.session:
            self.waits[turn.session] = turn.seconds
        return found

    def crowd(self, number: int, say: str, quiz=None) -> None:
        self.take(question(3 + 2 * number, number))
        policy = f"{SESSIONS}.rank" if self.act == "sessions" else LRU_RANK
        self.show(say, policy if self.turns.gone else MATCH, quiz)

    def about_lru(self):
        why = "A was used before all others. LRU does not know that A comes back, and that question 1 does not."
        return ask(
            "Question 2 needs two blocks, and none is free. Whose go under LRU?", "A’s", ("B’s", "question 1’s"), why
        )

    def about_crowd(self):
        why = "No session refers to question 1’s leaf. All such leaves go before those that a session refers to."
        return ask("Question 2 needs two blocks again. Whose go under sessions?", "question 1’s", ("A’s", "B’s"), why)

    def comes_back(self, say: str) -> None:
        """Run A's third turn."""
        prompt = len(AGAIN.blocks) - 1
        found = self.take(AGAIN)
        again = prompt - 1 - found  # of what it has said before
        self.totals[self.act] = f"A finds {found} of {prompt} blocks"
        why = f"{plural(found, 'block')} found: the system prompt" + (
            " and A’s four." if found > 1 else ", which all share."
        )
        quiz = ask(f"A comes back with {prompt} blocks, one of them new. How many are found?", found, (0, 1, 5, 6), why)
        self.show(say.format(again=plural(again, "block") if again else "nothing"), MATCH, quiz)

    def compacts(self) -> None:
        """Let B replace its history by a summary, and two questions come."""
        self.take(agent(12, "B", *SUMMARY))
        why = "B’s prompt does not continue its session’s text, so no turn will need the old branch."
        quiz = ask(
            "B replaces its history by a summary. Which blocks go first now?",
            "B’s old ones",
            ("A’s", "the summary"),
            why,
        )
        self.show(
            "B replaces its history by a summary, and the branch that it leaves goes first.", f"{SESSIONS}.began", quiz
        )
        self.take(question(13, 4))
        self.show("Question 4 takes the rest of the dead branch.", f"{SESSIONS}.rank")

    def closes(self) -> None:
        """Let A's client close its session."""
        self.turns.seconds, self.turns.gone = 15, []
        self.turns.manager.coordinator.close_session("A", None)
        self.closed.add("A")
        self.show(
            "A is done and closes its session. Nothing is freed, but no session refers to it now.", f"{SESSIONS}.close"
        )

    def last_resort(self) -> None:
        """Bring a prompt that needs more than all leaves without a session."""
        self.take(DOCUMENT)
        lost = [name for name in self.turns.gone if name in SUMMARY]
        why = "A reference is soft: it orders evictions, and never keeps a block from a running request."
        quiz = ask(
            "A long document comes. May it take a block that B’s session refers to?",
            "yes, as the last",
            ("no, it waits", "yes, as the first"),
            why,
        )
        self.show(
            f"A document needs more than all that has no session. The last to go is B’s {listed(lost)}.",
            f"{SESSIONS}.lost",
            quiz,
        )
