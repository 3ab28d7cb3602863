"""Course machinery. Lesson 8's lab: prompts that begin alike share blocks, in the lesson's own tree and manager."""

from collections.abc import Sequence
from typing import Any, ClassVar

from scripts.live.labs.events import words_of
from scripts.live.labs.lab import Knob, Preset, percent
from scripts.live.labs.scheduled import Scheduled
from scripts.traces.sharing import MANAGER, SPLIT, TREE, Telling, Told
from scripts.traces.tape import listed, plural
from scripts.traces.timeline import SCHEDULER

from mini_engine.base.errors import UserError
from mini_engine.engine.sampled import Sampled
from mini_engine.engine.scheduler import Scheduler
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.kv.cache_coordinator import cache_of
from mini_engine.kv.eviction import POLICIES

MOST_WORDS = 24
SYSTEM = "You are a helpful assistant . "


class Tree(Told, Scheduled):
    """A scheduler over a manager that shares prefixes. ids: of each word or punctuation mark, which is a token."""

    name, kind, lesson = "tree", "tree", "l8_radix"
    title = "Your own prompts in one tree"
    prompt, example = "words", "You are a helpful assistant. What is the capital of Spain?"
    verbs: ClassVar = {"+": "Arrive", ".": "Run a step", "*": "Run to the end", "-": "Abort"}
    knobs = (
        Knob("blocks", "blocks", 16, 4, 24),
        Knob("size", "block size", 4, 1, 8),
        Knob("answer", "tokens of an answer", 3, 1, 12),
        Knob("policy", "evict first", "lru", choices=("lru", "lfu", "fifo")),
    )
    presets = (
        Preset("Two prompts begin alike: what is computed twice?",
               f"+A={SYSTEM}What is the capital of France ?;*;+B={SYSTEM}What is the capital of Japan ?;*", {}),
        Preset("Twins arrive together: who computes?", f"+A={SYSTEM}Count to five .;+B={SYSTEM}Count to five .;*", {}),
        Preset("The pool is full: which prefix goes?",
               f"+A={SYSTEM}Tell me a story .;*;+B=The sea was calm and the ship was old;*;"
               f"+C={SYSTEM}Count to five .;*;"
               "+D=Once upon a time there was a small pool of blocks;*", {"blocks": 9}),
        Preset("What do small blocks save?",
               f"+A={SYSTEM}What is hot ?;*;+B={SYSTEM}What is cold ?;*", {"size": 1, "blocks": 24}),
    )  # fmt: skip
    modules = tuple(f"mini_engine/kv/{name}.py" for name in ("refcount", "radix", "prefix_cache", "radix_node"))
    code = (TREE, f"{TREE}.match", f"{TREE}.evict", SPLIT, f"{SCHEDULER}.add", f"{SCHEDULER}.schedule",
            *(f"{MANAGER}.{name}" for name in ("begin", "peek", "store", "release")))  # fmt: skip

    def __init__(self, chosen: dict[str, Any]) -> None:
        num_blocks = chosen["blocks"] + 1
        super().__init__(chosen, block_size=chosen["size"], num_blocks=num_blocks)
        manager = Telling(self, num_blocks, chosen["size"], policy=POLICIES[chosen["policy"]]())
        self.scheduler = Scheduler(manager, SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=64, watermark=0))
        self.ids: dict[str, int] = {}
        self.show(f"An empty tree and a pool of {chosen['blocks']} blocks of {chosen['size']} tokens.", TREE)

    def encode(self, words: Sequence[str]) -> list[int]:
        return [self.ids.setdefault(word, len(self.ids) + 1) for word in words]

    def line(self, token_ids: Sequence[int]) -> str:
        words = list(self.ids)
        return " ".join(words[token - 1] for token in token_ids)

    def state(self) -> dict[str, Any]:
        stats, states = cache_of(self.manager).prefixes.stats, self.manager.blocks_by_state
        more = {
            "prefill tokens saved": f"{stats.found_tokens} of {stats.asked_tokens} ({percent(stats.hit_rate)})",
            "blocks free, held, cached": f"{states.free}, {states.held}, {states.cached}",
        }
        return super().state() | {"counters": self.counters() | more}

    def finish(self) -> None:
        """Show which requests are in the queue."""
        if waiting := [request.id for request in self.scheduler.waiting]:
            self.show(listed(waiting, "waits for the next step.", "wait for the next step."), f"{SCHEDULER}.add")

    def arrive(self, name: str, text: str) -> None:
        words = words_of(text)
        if not 1 <= len(words) <= MOST_WORDS:
            raise UserError(f"{name}'s prompt has {len(words)} words; give 1 to {MOST_WORDS}")
        if error := self.add(name, self.encode(words), self.chosen["answer"]):
            self.show(f"{name} is refused: {error}.", f"{SCHEDULER}.add")

    def came(self, name: str, tokens: int, found: int, was_split: bool) -> None:
        blocks = list(self.manager.tables[name].blocks)
        split = " An edge is split." if was_split else ""
        where = f", in {plural(len(blocks), 'locked block')}" if found else ": all are computed"
        said = f"{name} is admitted. {found} of its {tokens} tokens are in the tree{where}.{split}"
        self.show(said, SPLIT if was_split else f"{TREE}.match" if found else f"{MANAGER}.begin", marked=blocks)

    def waits(self, token_ids: Sequence[int]) -> None:
        same = [request.id for request in self.scheduler.waiting if request.token_ids == list(token_ids)]
        said = f"{same[0]} waits a step: a running request computes what it needs."
        self.show(said, f"{MANAGER}.peek")

    def step(self) -> None:
        frames = len(self.frames)
        chunks = self.scheduler.schedule()
        sampled = [Sampled(self.next_word(chunk.request), None) for chunk in chunks if chunk.samples]
        self.scheduler.update(chunks, sampled)
        names = [chunk.request.id for chunk in chunks]
        if names and len(self.frames) == frames:
            self.show(f"{listed(names, 'decodes', 'decode')} a token.", f"{SCHEDULER}.schedule")

    def next_word(self, request) -> int:
        """Return the model's word, which depends on the prompt and the position, as a real one's does."""
        number = sum(request.prompt_ids) * 7 + len(request.token_ids)
        return self.encode([f"t{number % 97}"])[0]
