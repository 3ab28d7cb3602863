"""Course machinery. Lesson 8's lab: prompts that begin alike share blocks, in the lesson's own tree and manager."""

from collections.abc import Sequence
from typing import Any

from scripts.live.labs.events import words_of
from scripts.live.labs.lab import Knob, Lab, Preset, percent
from scripts.live.labs.rules import tree_rules
from scripts.live.labs.scheduled import Scheduled
from scripts.traces.tape import Tape, listed, plural
from scripts.traces.timeline import SCHEDULER
from scripts.traces.tree import MANAGER, SPLIT, TREE, Story, watched

from mini_engine.errors import UserError

MOST_WORDS = 24


class Words:
    """A tokenizer: each word or sign is a token."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def encode(self, words: Sequence[str]) -> list[int]:
        return [self.ids.setdefault(word, len(self.ids) + 1) for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        words = list(self.ids)
        return " ".join(words[token - 1] for token in ids)


class LabStory(Story):
    """Tells what the manager does, of prompts that a reader has typed."""

    def __init__(self, tape: Tape, tokenizer: Words) -> None:
        super().__init__(tape, tokenizer)
        self.prompts: dict[str, str] = {}
        self.world: Tree | None = None

    def show(self, say: str, question=None, marked: Sequence[int] = (), evicted: Sequence[int] = (), code="") -> None:
        super().show(say, question, marked, evicted, code)
        if self.world:
            self.tape.frames[-1]["counters"] = self.world.counters()

    def came(self, name: str, tokens: int, found: int, was_split: bool) -> None:
        self.asked[name] = (tokens, found)
        blocks = self.manager.tables[name].blocks
        split = " An edge is split where the two diverge." if was_split else ""
        where = f", in {plural(len(blocks), 'block')} that are locked now" if found else ": all are computed"
        said = f"{name} is admitted. {found} of its {tokens} tokens are in the tree{where}.{split}"
        self.show(said, marked=blocks, code=SPLIT if was_split else f"{TREE}.match" if found else f"{MANAGER}.begin")

    def waits(self, token_ids: Sequence[int]) -> None:
        text = self.tokenizer.decode(token_ids)
        name = next(
            (name for name, prompt in self.prompts.items() if prompt == text and name not in self.manager.tables), ""
        )
        said = f"{name} waits a step: a running request is computing what it needs, and will share it."
        self.show(said, code=f"{MANAGER}.peek")


class Tree(Scheduled):
    """A scheduler over a manager that shares prefixes."""

    def __init__(self, tape: Tape, settings: dict[str, Any]) -> None:
        from mini_engine.engine.scheduler import Scheduler, SchedulerConfig
        from mini_engine.kv.eviction import POLICIES

        self.words, self.answer = Words(), settings["answer"]
        self.story = LabStory(tape, self.words)
        self.story.world = self
        tape.scene |= {"block_size": settings["size"], "num_blocks": settings["blocks"] + 1}
        policy = POLICIES[settings["policy"]]()
        manager = watched(self.story)(settings["blocks"] + 1, settings["size"], policy=policy)
        self.scheduler = Scheduler(manager, SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=64, watermark=0))
        self.tape = tape
        said = f"An empty tree and a pool of {settings['blocks']} blocks of {settings['size']} tokens."
        self.story.show(said, code=TREE)

    def finish(self) -> None:
        """Show which requests are in the queue."""
        if waiting := [request.id for request in self.scheduler.waiting]:
            said = f"{listed(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for the next step."
            self.story.show(said, code=f"{SCHEDULER}.add")

    def arrive(self, name: str, text: str) -> None:
        from mini_engine.engine.request import Request
        from mini_engine.engine.sampling_params import SamplingParams

        words = words_of(text)
        if not 1 <= len(words) <= MOST_WORDS:
            raise UserError(f"{name}'s prompt has {len(words)} words; give 1 to {MOST_WORDS}")
        ids = self.words.encode(words)
        params = SamplingParams(temperature=0, max_tokens=self.answer, seed=0)
        try:
            self.scheduler.add(Request(name, ids, params))
        except UserError as error:
            self.story.show(f"{name} is refused: {error}.", code=f"{SCHEDULER}.add")
            return
        self.story.prompts[name] = self.words.decode(ids)

    def step(self) -> None:
        from mini_engine.engine.sampled import Sampled

        frames = len(self.tape.frames)
        chunks = self.scheduler.schedule()
        sampled = [Sampled(self.next_word(chunk.request), None) for chunk in chunks if chunk.samples]
        self.scheduler.update(chunks, sampled)
        names = [chunk.request.id for chunk in chunks]
        if names and len(self.tape.frames) == frames:
            said = f"{listed(names)} {'decodes' if len(names) == 1 else 'decode'} a token."
            self.story.show(said, code=f"{SCHEDULER}.schedule")

    def next_word(self, request) -> int:
        """The model: a word that depends on the prompt and the position, as a real one's does."""
        number = sum(request.prompt_ids) * 7 + len(request.token_ids)
        return self.words.encode([f"t{number % 97}"])[0]

    def counters(self) -> dict[str, Any]:
        manager = self.story.manager
        stats, states = manager.prefixes.stats, manager.blocks_by_state
        return {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "preempted so far": self.scheduler.num_preemptions,
            "prefill tokens saved": f"{stats.found_tokens} of {stats.asked_tokens} ({percent(stats.hit_rate)})",
            "blocks free, held, cached": f"{states.free}, {states.held}, {states.cached}",
        }


SYSTEM = "You are a helpful assistant . "
LAB = Lab(
    name="tree",
    title="Your own prompts in one tree",
    kind="tree",
    prompt="words",
    example="You are a helpful assistant. What is the capital of Spain?",
    verbs={"+": "Arrive", ".": "Run a step", "*": "Run to the end", "-": "Abort"},
    knobs=(
        Knob("blocks", "blocks", 16, 4, 24),
        Knob("size", "block size", 4, 1, 8),
        Knob("answer", "tokens of an answer", 3, 1, 12),
        Knob("policy", "evict first", "lru", choices=("lru", "lfu", "fifo")),
    ),
    presets=(
        Preset("Two prompts begin alike: what is computed twice?",
               f"+A={SYSTEM}What is the capital of France ?;*;+B={SYSTEM}What is the capital of Japan ?;*", {}),
        Preset("Twins arrive together: who computes?", f"+A={SYSTEM}Count to five .;+B={SYSTEM}Count to five .;*", {}),
        Preset("The pool is full: which prefix goes?",
               f"+A={SYSTEM}Tell me a story .;*;+B=The sea was calm and the ship was old;*;"
               f"+C={SYSTEM}Count to five .;*;"
               "+D=Once upon a time there was a small pool of blocks;*", {"blocks": 9}),
        Preset("What do small blocks save?",
               f"+A={SYSTEM}What is hot ?;*;+B={SYSTEM}What is cold ?;*", {"size": 1, "blocks": 24}),
    ),
    modules=("mini_engine/kv/refcount.py", "mini_engine/kv/radix.py", "mini_engine/kv/prefix_cache.py",
             "mini_engine/kv/radix_node.py"),
    world=Tree,
    lesson="l8_radix",
    rules=tree_rules,
    code=(TREE, f"{TREE}.match", f"{TREE}.evict", SPLIT, f"{SCHEDULER}.add", f"{SCHEDULER}.schedule",
          *(f"{MANAGER}.{name}" for name in ("begin", "peek", "store", "release"))),
)  # fmt: skip
