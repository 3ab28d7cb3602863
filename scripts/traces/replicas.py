"""Course machinery. Lesson 13's trace: the same chats under three policies, and how requests find their replica."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from scripts.traces.sharing import below
from scripts.traces.tape import Tape, ask, listed, plural

from lessons.l13_machines.simulate import Arrival, Rates, SimulatedReplica
from mini_engine.distributed.routing.policy import PrefixScore, RoundRobin

NUM_REPLICAS, CAPACITY = 3, 8
GAP = 0.5  # seconds between two requests
CHATS = "ABCABACD"  # whose turn it is
BLOCKS_PER_TURN = 2
PREFILL, DECODE, ANSWER = 4.0, 10.0, 10  # blocks/s, tokens/s, tokens
ASKED = (2, 3, 6)  # requests of an act that come with a question
OPTIONS = ("replica 0", "replica 1", "replica 2")
POLICY = "mini_engine/distributed/routing/policy.py"
ROUND_ROBIN, AFFINITY, SCORE = "round robin", "pure affinity", "the score"
ACTS = {  # the first caption
    ROUND_ROBIN: f"{NUM_REPLICAS} replicas cache {CAPACITY} blocks each; all prompts begin with block S. First, "
    "round robin.",
    AFFINITY: "The same chats again. Now each goes where most of its prompt is known, whatever the load.",
    SCORE: "Once more, with the score: the share that is known, minus how much busier than the mean.",
}


def chats() -> list[tuple[str, list[int]]]:
    """Return the requests: a chat's letter, and the ids of its prompt's blocks. Block 0 is the system prompt of all."""
    turns: Counter[str] = Counter()
    requests = []
    for chat in CHATS:
        turns[chat] += BLOCKS_PER_TURN
        requests.append((chat, [0, *(100 * ord(chat) + turn for turn in range(1, turns[chat] + 1))]))
    return requests


def name_of(block: int) -> str:
    """Return a block's name in the picture: S is the system prompt, A1 the first block of chat A."""
    return f"{chr(block // 100)}{block % 100}" if block else "S"


class Replicas(Tape):
    """One policy after another, each with its own replicas. totals: each policy's result."""

    def __init__(self) -> None:
        scene = {"replicas": NUM_REPLICAS, "capacity": CAPACITY, "acts": list(ACTS)}
        title = "Requests find their replica"
        super().__init__("l13-replicas", "l13_machines/replicas.trace.js", "replicas", title, 26, **scene)
        self.totals: dict[str, str] = {}

    def record(self) -> None:
        """Play the same chats under each policy."""
        for act, opening in ACTS.items():
            self.begin(act)
            self.show(opening, f"{POLICY}::{type(self.policy).__name__}.__init__")
            for number, (chat, keys) in enumerate(chats()):
                self.take(number, chat, keys)

    def begin(self, act: str) -> None:
        self.act = act
        self.policy = RoundRobin() if act == ROUND_ROBIN else PrefixScore(float(act == SCORE), CAPACITY)
        self.replicas = [SimulatedReplica(CAPACITY, Rates(PREFILL, DECODE)) for _ in range(NUM_REPLICAS)]
        self.loads: dict[int, float] = dict.fromkeys(range(NUM_REPLICAS), 0.0)
        self.scores: dict[int, str] = {}
        self.found, self.waited = 0, 0.0

    def state(self) -> dict[str, Any]:
        """Return loads and scores of the choice, and blocks after it. chosen: the replica, -1 for none."""
        replicas = []
        for index, replica in enumerate(self.replicas):
            held = sorted(block for node, _ in below(replica.tree.root) for block in node.blocks)
            about = {"load": int(self.loads[index]), "score": self.scores.get(index, "")}
            replicas.append(about | {"blocks": list(map(name_of, held))})
        totals = [f"{name}: {said}" for name, said in self.totals.items()]
        return {"act": self.act, "prompt": [], "chosen": -1, "replicas": replicas, "totals": totals}

    def take(self, number: int, chat: str, keys: list[int]) -> None:
        """Send one request, and show the policy's choice."""
        now = GAP * number
        self.loads = {index: replica.load(now) for index, replica in enumerate(self.replicas)}
        chosen = self.policy.choose(keys, self.loads)
        why = self.reason(keys)
        one = self.replicas[chosen].serve(chosen, Arrival(now, keys, ANSWER))
        self.policy.sent(chosen, keys)
        self.policy.found(chosen, keys, one.num_found)
        self.found += one.num_found
        self.waited += one.waited
        mean = self.waited / (number + 1)
        self.totals[self.act] = f"{plural(self.found, 'block')} found, first token after {mean:.2f} s on average"
        begins = f"Chat {chat} {'comes again' if len(keys) > 1 + BLOCKS_PER_TURN else 'arrives'}"
        question = ask(f"{begins}. Where does it go?", f"replica {chosen}", OPTIONS, why) if number in ASKED else None
        self.show(
            f"{begins}: {len(keys)} blocks. Replica {chosen} has {one.num_found}, computes "
            f"{one.num_computed}; first token after {one.waited:.2f} s.",
            f"{POLICY}::{type(self.policy).__name__}.choose",
            question,
            prompt=list(map(name_of, keys)),
            chosen=chosen,
        )

    def reason(self, keys: Sequence[int]) -> str:
        """Explain the choice of the replica, and note the scores in that form."""
        if not isinstance(self.policy, PrefixScore):
            return "Each has its turn, whatever the prompt."
        scores = self.policy.scores(keys, self.loads)
        self.scores = {index: f"{round(score, 2) + 0.0:+.2f}".replace("-", "−") for index, score in scores.items()}
        known = [self.policy.seen[index].matched(keys) for index in scores]
        why = f"The replicas are believed to have {listed(known)} of its blocks"
        if self.policy.beta:
            why += f", and they have {listed(list(map(int, self.loads.values())))} requests to finish"
        return f"{why}: the scores are {listed(list(self.scores.values()))}."
