"""Course machinery. Lesson 8's trace: chats that begin alike share blocks; the tree splits, caches and evicts."""

from array import array
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from scripts.traces.tape import Tape, ask, listed, plural

if TYPE_CHECKING:
    from mini_engine.kv.manager import KvCacheManager as Manager
else:
    Manager = object  # `watched` mixes the real one in: importing this module must not import the code to be recorded

BLOCK_SIZE, NUM_BLOCKS = 4, 20
ANSWER = 7  # tokens of an answer
TREE = "mini_engine/kv/radix.py::RadixTree"
SPLIT = "mini_engine/kv/radix_node.py::Node.split"
MANAGER = "mini_engine/kv/prefix_cache.py::PrefixCache"
RATE = "mini_engine/kv/radix.py::HitStats.hit_rate"
HEAD_START, STEPS = 2, 40  # steps before B joins A; more steps than any later arrival takes
ARRIVALS = ("A", "B", "C", "DE", "F")
SYSTEM = "You are a helpful assistant."
PROMPTS = {
    "A": "What is the capital of France?",
    "B": "What is the capital of Japan?",
    "C": "Count from one to five.",
    "D": "What is the opposite of hot?",
    "E": "What is the opposite of hot?",
    "F": "What is the capital of France?",
}


def tape() -> Tape:
    scene = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS}
    return Tape("l8-tree", "l8_radix/tree.trace.js", "tree", "A tree of shared prefixes", scene, 9)


def watched(story: "Story"):
    """Return what makes a manager with lesson 8's prefix cache that reports its calls to the story."""
    from mini_engine.kv.manager import KvCacheManager, no_store
    from mini_engine.kv.prefix_cache import PrefixCache

    class Watched(Reporting, KvCacheManager):
        teller = story

    def make(num_blocks: int, block_size: int, copy=no_store, policy=None) -> Watched:
        return Watched(num_blocks, block_size, copy, prefixes=partial(PrefixCache, policy=policy))

    return make


class Reporting(Manager):
    """A mixin for a prefix cache manager: each method does the manager's work and then reports to `teller`, a Story."""

    teller: "Story"

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.teller.manager, evict = self, self.prefixes.tree.evict

        def watched_evict(num_blocks):
            gone = evict(num_blocks)
            self.teller.evicted(gone)
            return gone

        self.prefixes.tree.evict = watched_evict

    def cost(self, token_ids, *rest, **options):
        cost = super().cost(token_ids, *rest, **options)
        if cost.should_wait:
            self.teller.waits(token_ids)
        return cost

    def allocate(self, request_id, token_ids, *rest, **options):
        nodes = self.teller.num_nodes
        found = super().allocate(request_id, token_ids, *rest, **options)
        self.teller.came(request_id, len(token_ids), found, self.teller.num_nodes > nodes)
        return found

    def grow(self, request_id, num_tokens):
        self.teller.growing = request_id
        return super().grow(request_id, num_tokens)

    def commit(self, request_id, token_ids, num_computed):
        stored = self.prefixes.tree.num_blocks
        super().commit(request_id, token_ids, num_computed)
        self.teller.stored(request_id, self.prefixes.tree.num_blocks - stored)

    def free(self, request_id, computed_ids=()):
        blocks = list(self.tables[request_id].blocks) if request_id in self.tables else None
        stored, free = self.prefixes.tree.num_blocks, self.allocator.num_free
        super().free(request_id, computed_ids)
        if blocks is not None:
            self.teller.left(request_id, self.prefixes.tree.num_blocks - stored, self.allocator.num_free - free)


class Story:
    """Turns what the manager did into frames, from its state after each call."""

    def __init__(self, tape: Tape, tokenizer) -> None:
        self.tape, self.tokenizer = tape, tokenizer
        self.manager: Any = None
        self.growing = ""
        self.asked: dict[str, tuple[int, int]] = {}  # request to its tokens, and how many of them were found

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """The tree's nodes, parents before children. `parent` is the first block of the parent, or 0 for the root."""
        found = []

        def visit(node, parent: int) -> None:
            for child in node.children.values():
                name = child.blocks[0]
                found.append(
                    {"blocks": list(child.blocks), "locks": child.locks, "parent": parent, "text": self.text(child)}
                )
                visit(child, name)

        visit(self.manager.prefixes.tree.root, 0)
        return found

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    def text(self, node) -> str:
        ids = array("I", bytes(node.key)).tolist()
        return " ".join(self.tokenizer.decode(ids).split())

    def show(
        self, say: str, question=None, marked: Sequence[int] = (), evicted: Sequence[int] = (), code: str = ""
    ) -> None:
        manager = self.manager
        tables = [
            {"name": name, "blocks": list(table.blocks), "tokens": self.asked[name][0], "found": self.asked[name][1]}
            for name, table in manager.tables.items()
        ]
        state = {"nodes": self.nodes, "tables": tables, "counts": list(manager.allocator.counts)}
        by_state = manager.blocks_by_state
        sums = {"free": by_state.free, "held": by_state.held, "cached": by_state.cached}
        self.tape.frame(say, question, code, **state, sums=sums, marked=list(marked), evicted=list(evicted))

    def came(self, name: str, tokens: int, found: int, was_split: bool) -> None:
        self.asked[name] = (tokens, found)
        blocks = self.manager.tables[name].blocks
        if not found:
            self.show(
                f"{name} asks “{PROMPTS[name]}”: {tokens} tokens with the system prompt. The tree is empty, so "
                "nothing is found.",
                code=f"{MANAGER}.begin",
            )
            return
        split = " The edge is split where the two prompts diverge." if was_split else ""
        twin = self.twin_of(name)
        if twin:
            say = (
                f"{name} has waited a step. {found} of its {tokens} tokens are in the tree now, in "
                f"{plural(len(blocks), 'block')} that {twin} uses as well."
            )
        else:
            say = (
                f"{name} asks “{PROMPTS[name]}”. {found} of its {tokens} tokens are in the tree, in "
                f"{plural(len(blocks), 'block')}: locked now, not computed again.{split}"
            )
        question, code = self.question_of(name, tokens, found, bool(twin)), SPLIT if was_split else f"{TREE}.match"
        self.show(say, question, marked=blocks, code=code)

    def twin_of(self, name: str) -> str | None:
        """Return a running request with the same prompt, if there is one."""
        return next((other for other in self.manager.tables if other != name and PROMPTS[other] == PROMPTS[name]), None)

    def waits(self, token_ids: Sequence[int]) -> None:
        """Tell that a request not yet admitted waits for its twin."""
        text = self.tokenizer.decode(token_ids)
        name = next(name for name, prompt in PROMPTS.items() if prompt in text and name not in self.asked)
        twin = self.twin_of(name)
        why = (
            f"After this step, {twin}'s blocks are in the tree. Computing them a second time would take just as long, "
            "and more blocks."
        )
        question = ask(
            f"{name} arrived in the same step as {twin} and asks the same. The question is not computed yet. What "
            f"does {name} do?",
            "waits a step",
            ("computes it too", "reads the empty blocks"),
            why,
        )
        self.show(
            f"{name} asks the same in the same step. {twin} is computing what {name} needs, so {name} waits a step: it "
            "keeps its place in the queue, and nothing is computed twice.",
            question,
            marked=self.manager.tables[twin].blocks,
            code=f"{MANAGER}.peek",
        )

    def question_of(self, name: str, tokens: int, found: int, is_twin: bool):
        if is_twin:
            why = (
                f"Its twin's whole blocks are in the tree; the last one, partly filled, is not. {found} = "
                f"{found // BLOCK_SIZE} × {BLOCK_SIZE}."
            )
            question = f"{name} has waited a step. How many of its {tokens} tokens does it find now?"
            return ask(question, found, (0, 16, tokens), why)
        if name == "B":
            why = (
                f"Its first 19 tokens are A's, and only whole blocks are shared: 19 / {BLOCK_SIZE} rounded down is "
                f"{found // BLOCK_SIZE} blocks."
            )
            return ask(
                "B's prompt differs from A's from token 19 on. How many of its tokens are found?",
                found,
                (19, tokens, 0),
                why,
            )
        if name == "F":
            why = "Its end was evicted, its beginning was not: a prefix is useful without its tail."
            return ask(
                "F asks what A asked, but A's answer has been evicted since. How many tokens are found?",
                found,
                (0, 24, tokens),
                why,
            )
        return None

    def evicted(self, gone: Sequence[int]) -> None:
        if not gone:
            return
        stay = [node["blocks"][-1] for node in self.nodes if node["locks"]]
        young = [node["blocks"][-1] for node in self.nodes if not node["locks"]]
        why = "The least recently used unlocked leaf gives up blocks from its end. Locked blocks stay."
        question = None
        if not any("question" in frame.get("ask", {}) and frame["evicted"] for frame in self.tape.frames):
            wrong = (1, *stay[-1:], *young[-1:])
            question = ask(
                f"{self.growing} needs a block and none is free. Which cached block is evicted?",
                listed(gone),
                wrong,
                why,
            )
        self.show(
            f"{self.growing} needs a block and none is free. The least recently used leaf gives up its last block: "
            f"{listed(gone)}.",
            question,
            evicted=gone,
            code=f"{TREE}.evict",
        )

    def stored(self, name: str, count: int) -> None:
        """Tell which of a prompt's blocks were stored; an answer's are stored when the request ends."""
        if not count:
            return
        tokens, found = self.asked[name]
        blocks = self.manager.tables[name].blocks
        first = found // BLOCK_SIZE
        new = blocks[first : first + count]
        rest = tokens - found
        self.show(
            f"{name}'s prefill: {plural(rest, 'token')} computed. {plural(count, 'whole block')} of them "
            f"{'goes' if count == 1 else 'go'} into the tree: {listed(new)}. Later requests can find "
            f"{'it' if count == 1 else 'them'}.",
            marked=new,
            code=f"{MANAGER}.store",
        )

    def left(self, name: str, count: int, freed: int) -> None:
        """Tell that a request has ended."""
        sums = self.manager.blocks_by_state
        if count:
            say = (
                f"{name} has ended. The whole blocks that hold its answer stay too: {count} more. No running request "
                "uses them, so they can be evicted."
            )
        else:
            say = (
                f"{name} has ended. Its answer is already stored, so its own copies are duplicates: "
                f"{plural(freed, 'block')} freed."
            )
        question = None
        if name == "A":
            why = "They stay until the pool needs them. The scheduler counts them as free."
            question = ask(
                "A has ended. What happens to the blocks that only A used?",
                "cached, evictable",
                ("free at once", "locked forever"),
                why,
            )
        say += f" Free {sums.free}, held {sums.held}, cached {sums.cached}."
        self.show(say, question, code=f"{MANAGER}.release")


def record(tape: Tape) -> None:
    """Run chats one after another, two of them as twins, until the pool runs short."""
    from mini_engine.checkpoint.weights import load_model
    from mini_engine.engine.engine import Engine
    from mini_engine.engine.sampling_params import SamplingParams
    from mini_engine.engine.scheduler import SchedulerConfig
    from mini_engine.pocket import POCKET_DIR
    from mini_engine.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(POCKET_DIR)
    story = Story(tape, tokenizer)
    options = {"kernel": "reference", "manager": watched(story), "scheduler_config": SchedulerConfig(watermark=0)}
    engine = Engine.for_model(load_model(POCKET_DIR), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, **options)
    story.show(
        f"An empty tree and a pool of {NUM_BLOCKS - 1} blocks of {BLOCK_SIZE} tokens. Six chats will arrive, all "
        "with the same system prompt.",
        code=TREE,
    )
    for names in ARRIVALS:
        for name in names:
            chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROMPTS[name]}]
            engine.add_request(name, tokenizer.encode_chat(chat), SamplingParams(temperature=0, max_tokens=ANSWER))
        for _ in range(HEAD_START if names == "A" else STEPS):
            if engine.has_unfinished:
                engine.step()
    stats = story.manager.prefixes.stats
    story.show(
        f"All have ended. {stats.found_tokens} of {stats.asked_tokens} prompt tokens were found rather than "
        f"computed: {100 * stats.hit_rate:.0f} %. The tree keeps what fits.",
        code=RATE,
    )
