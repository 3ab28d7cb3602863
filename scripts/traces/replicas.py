"""Course machinery. Lesson 13's trace: the same chats under three policies, and how requests find their replica."""

from collections import Counter
from collections.abc import Sequence

from scripts.traces.tape import Tape, ask, listed, plural

NUM_REPLICAS, CAPACITY = 3, 8
GAP = 0.5  # seconds between two requests
CHATS = "ABCABACD"  # whose turn it is
BLOCKS_PER_TURN = 2
PREFILL, DECODE, ANSWER = 4.0, 10.0, 10  # blocks/s, tokens/s, tokens
ACTS = ("round robin", "pure affinity", "the score")
ASKED = (2, 3, 6)  # before which requests of an act there is a question
OPTIONS = ("replica 0", "replica 1", "replica 2")
POLICY = "mini_engine/distributed/routing/policy.py"


def tape() -> Tape:
    scene = {"replicas": NUM_REPLICAS, "capacity": CAPACITY, "acts": list(ACTS)}
    return Tape("l13-replicas", "l13_machines/replicas.trace.js", "replicas", "Requests find their replica", scene, 26)


def chats() -> list[tuple[str, list[int]]]:
    """Return the requests: a chat's letter, and the ids of its prompt's blocks. Block 0 is the system prompt of all."""
    turns: Counter[str] = Counter()
    requests = []
    for chat in CHATS:
        turns[chat] += BLOCKS_PER_TURN
        requests.append((chat, [0, *(100 * ord(chat) + turn for turn in range(1, turns[chat] + 1))]))
    return requests


def name_of(block: int) -> str:
    """Return what a block is called in the picture: S is the system prompt, A1 the first block of chat A."""
    return f"{chr(block // 100)}{block % 100}" if block else "S"


class Act:
    """One policy, with replicas of its own."""

    def __init__(self, tape: Tape, name: str, totals: dict[str, str]) -> None:
        from mini_engine.distributed.routing.policy import PrefixScore, RoundRobin
        from mini_engine.distributed.routing.simulate import Rates, SimulatedReplica

        self.tape, self.name, self.totals = tape, name, totals
        self.policy = RoundRobin() if name == ACTS[0] else PrefixScore(float(name == ACTS[2]), CAPACITY)
        self.replicas = [SimulatedReplica(CAPACITY, Rates(PREFILL, DECODE)) for _ in range(NUM_REPLICAS)]
        self.loads, self.scores = dict.fromkeys(range(NUM_REPLICAS), 0.0), {}
        self.found, self.waited = 0, 0.0

    def held(self, index: int) -> list[str]:
        """Return the names of the blocks in a replica's cache, in order."""
        stack, found = [self.replicas[index].tree.root], []
        while stack:
            node = stack.pop()
            found += node.blocks
            stack += node.children.values()
        return [name_of(block) for block in sorted(found)]

    def show(self, say: str, question=None, prompt: Sequence[int] = (), chosen: int = -1) -> None:
        """Add a frame: loads and scores of the choice, blocks after it. chosen: the replica, -1 for none."""
        self.tape.frame(
            say,
            question,
            f"{POLICY}::{type(self.policy).__name__}.{'choose' if prompt else '__init__'}",
            act=self.name,
            prompt=list(map(name_of, prompt)),
            chosen=chosen,
            replicas=[
                {"load": int(self.loads[index]), "blocks": self.held(index), "score": self.scores.get(index, "")}
                for index in range(NUM_REPLICAS)
            ],
            totals=[f"{name}: {said}" for name, said in self.totals.items()],
        )

    def take(self, number: int, chat: str, keys: list[int]) -> None:
        """Send one request, and tell what the policy made of it."""
        from mini_engine.distributed.routing.simulate import Arrival

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
        self.totals[self.name] = f"{plural(self.found, 'block')} found, first token after {mean:.2f} s on average"
        again = "comes again" if len(keys) > 1 + BLOCKS_PER_TURN else "arrives"
        question = ask(f"Chat {chat} {again}. Where does it go?", f"replica {chosen}", OPTIONS, why) if number else None
        say = f"Chat {chat} {again}: {len(keys)} blocks. Replica {chosen} has {one.num_found} of them, and computes "
        say += f"{one.num_computed}; the first token comes after {one.waited:.2f} s."
        self.show(say, question if number in ASKED else None, keys, chosen)

    def reason(self, keys: list[int]) -> str:
        """Return why the chosen replica is chosen, and note the scores as they are written."""
        from mini_engine.distributed.routing.policy import PrefixScore

        if not isinstance(self.policy, PrefixScore):
            return "Each has its turn, whatever the prompt."
        scores = self.policy.scores(keys, self.loads)
        self.scores = {index: f"{round(score, 2) + 0.0:+.2f}".replace("-", "−") for index, score in scores.items()}
        known = [self.policy.seen[index].matched(keys) for index in scores]
        why = f"The replicas are believed to have {listed(known)} of its blocks"
        if self.policy.beta:
            why += f", and they have {listed(list(map(int, self.loads.values())))} requests to finish"
        return f"{why}: the scores are {listed(list(self.scores.values()))}."


OPENING = {
    ACTS[0]: f"{NUM_REPLICAS} replicas, each with a cache of {CAPACITY} blocks. All prompts begin with one system "
    "prompt, block S. First, round robin: each replica in its turn.",
    ACTS[1]: "The same chats, with empty caches. Now each goes where most of its prompt is known, whatever the load.",
    ACTS[2]: "The same chats once more, with the score: the share that is known, minus how much busier than the mean.",
}


def record(tape: Tape) -> None:
    """Play the same chats under each policy."""
    totals: dict[str, str] = {}
    for name in ACTS:
        act = Act(tape, name, totals)
        act.show(OPENING[name])
        for number, (chat, keys) in enumerate(chats()):
            act.take(number, chat, keys)
