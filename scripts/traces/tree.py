"""Course machinery. Lesson 8's trace: chats that begin alike share blocks; the tree splits, caches and evicts."""

from collections.abc import Sequence
from functools import partial

from scripts.traces.sharing import MANAGER, SPLIT, TREE, Telling, Told
from scripts.traces.tape import ask

from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.kv.cache_coordinator import cache_of

BLOCK_SIZE, NUM_BLOCKS = 4, 20
ANSWER = 7  # tokens of an answer
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


class Chats(Told):
    """Chats of the pocket model, two of them twins."""

    def __init__(self) -> None:
        title = "A tree of shared prefixes"
        super().__init__(
            "l8-tree", "l8_radix/tree.trace.js", "tree", title, 9, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS
        )

    def record(self) -> None:
        """Run chats one after another, two of them as twins, until the pool runs short."""
        engine = Engine.for_model(
            self.model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, kernel="reference",
            manager=partial(Telling, self), scheduler_config=SchedulerConfig(watermark=0),
        )  # fmt: skip
        self.show(
            f"An empty tree, {NUM_BLOCKS - 1} blocks of {BLOCK_SIZE} tokens, and six chats to come with one system "
            "prompt.",
            TREE,
        )
        for names in ARRIVALS:
            for name in names:
                chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROMPTS[name]}]
                params = SamplingParams(temperature=0, max_tokens=ANSWER)
                engine.add_request(name, self.tokenizer.encode_chat(chat), params)
            for _ in range(HEAD_START if names == "A" else STEPS):
                if engine.has_unfinished:
                    engine.step()
        stats = cache_of(self.manager).prefixes.stats
        self.show(
            f"All have ended. {stats.found_tokens} of {stats.asked_tokens} prompt tokens were found, not computed: "
            f"{100 * stats.hit_rate:.0f} %.",
            RATE,
        )

    def came(self, name: str, tokens: int, found: int, was_split: bool) -> None:
        blocks, twin = self.manager.tables[name].blocks, self.twin_of(name)
        if not found:
            said = f"{name} asks “{PROMPTS[name]}”: {tokens} tokens. The tree is empty: nothing is found."
            return self.show(said, f"{MANAGER}.begin")
        if twin:
            say = f"{name} has waited a step. {found} of its {tokens} tokens are found now, in blocks of {twin}'s."
        else:
            split = " The edge is split." if was_split else ""
            say = f"{name} asks “{PROMPTS[name]}” {found} of {tokens} tokens are found and locked.{split}"
        code = SPLIT if was_split else f"{TREE}.match"
        return self.show(say, code, self.question_of(name, tokens, found, bool(twin)), marked=list(blocks))

    def twin_of(self, name: str) -> str | None:
        """Return a running request with the same prompt, if there is one."""
        return next((other for other in self.manager.tables if other != name and PROMPTS[other] == PROMPTS[name]), None)

    def waits(self, token_ids: Sequence[int]) -> None:
        text = self.tokenizer.decode(token_ids)
        name = next(name for name, prompt in PROMPTS.items() if prompt in text and name not in self.asked)
        twin = self.twin_of(name)
        why = (
            f"After this step, {twin}'s blocks are in the tree. Computing them a second time would take just as long, "
            "and more blocks."
        )
        text = f"{name} arrived in the same step as {twin} and asks the same. The question is not computed yet. "
        wrong = ("computes it too", "reads the empty blocks")
        self.show(
            f"{name} asks the same in the same step. {twin} computes what {name} needs, so {name} waits a step.",
            f"{MANAGER}.peek",
            ask(f"{text}What does {name} do?", "waits a step", wrong, why),
            marked=list(self.manager.tables[twin].blocks),
        )

    def question_of(self, name: str, tokens: int, found: int, is_twin: bool):
        if is_twin:
            why = (
                f"Its twin's whole blocks are in the tree; the last one, partly filled, is not. {found} = "
                f"{found // BLOCK_SIZE} × {BLOCK_SIZE}."
            )
            text = f"{name} has waited a step. How many of its {tokens} tokens does it find now?"
            return ask(text, found, (0, 16, tokens), why)
        if name == "B":
            why = (
                f"Its first 19 tokens are A's, and only whole blocks are shared: 19 / {BLOCK_SIZE} rounded down is "
                f"{found // BLOCK_SIZE} blocks."
            )
            text = "B's prompt differs from A's from token 19 on. How many of its tokens are found?"
            return ask(text, found, (19, tokens, 0), why)
        if name == "F":
            why = "Its end was evicted, its beginning was not: a prefix is useful without its tail."
            text = "F asks what A asked, but A's answer has been evicted since. How many tokens are found?"
            return ask(text, found, (0, 24, tokens), why)
        return None
