"""Course machinery. Lesson 2's lab: prompts arrive and end in one pool; the lesson's own allocator and `reserve`."""

from typing import Any, ClassVar

from scripts.live.labs.events import words_of
from scripts.live.labs.lab import Knob, Lab, Preset, percent
from scripts.traces.tape import listed, plural

from mini_engine.base.errors import OutOfBlocks, UserError
from mini_engine.kv.allocator import BlockAllocator

ALLOCATOR = "mini_engine/kv/allocator.py::BlockAllocator"
RESERVE = "mini_engine/kv/token_flat.py::reserve"


class Pool(Lab):
    """Requests in one pool. Each holds blocks or waits for them. texts: their tokens."""

    name, kind, lesson = "pool", "pool", "l2_token_flat"
    title = "Your own requests in one pool"
    prompt, example = "words", "Once upon a time"
    verbs: ClassVar = {"+": "Arrive", ".": "Decode a token each", "-": "End"}
    knobs = (Knob("blocks", "blocks", 6, 2, 12), Knob("size", "block size", 4, 1, 8))
    presets = (
        Preset("Must a request's blocks be adjacent?",
               "+A=The capital of France is;+B=Once upon a time;.;.;.;-B;+C=Count one two three four", {}),
        Preset("What does a request that does not fit leave behind?",
               "+A=The capital of France is;+B=Once upon a time there was;"
               "+C=The opposite of hot is cold;+D=Hello there;-A", {}),
        Preset("How much is wasted with large blocks?",
               "+A=Hello;+B=The sea;+C=Once upon a time", {"blocks": 3, "size": 8}),
        Preset("And with blocks of one slot?",
               "+A=Hello;+B=The sea;+C=Once upon a time", {"blocks": 12, "size": 1}),
    )  # fmt: skip
    modules = ("mini_engine/kv/allocator.py", "mini_engine/kv/token_flat.py")
    code = (ALLOCATOR, f"{ALLOCATOR}.alloc_blocks", f"{ALLOCATOR}.free", RESERVE)

    def __init__(self, chosen: dict[str, Any]) -> None:
        blocks, self.size = chosen["blocks"], chosen["size"]
        super().__init__(chosen, block_size=self.size, num_blocks=blocks)
        self.allocator = BlockAllocator(blocks, self.size, reserved=0)
        self.requests: dict[str, Any] = {}
        self.texts: dict[str, list[str]] = {}
        self.slots: list[str | None] = [None] * (blocks * self.size)
        self.show(f"A pool of {blocks} blocks with {self.size} slots each, all of them free.", ALLOCATOR)

    @property
    def alive(self) -> list[str]:
        return list(self.requests)

    def state(self) -> dict[str, Any]:
        requests = [
            {"name": name, "words": list(self.texts[name]), "blocks": list(each.blocks),
             "slots": len(each.slot_indices), "written": each.cur_len}
            for name, each in self.requests.items()
        ]  # fmt: skip
        held = sum(each["slots"] for each in requests)
        unused = held - sum(each["written"] for each in requests)
        counters = {
            "running": sum(each["written"] > 0 for each in requests),
            "waiting": sum(each["written"] == 0 for each in requests),
            "blocks free": self.allocator.num_free,
            "slots held but unused": f"{unused} of {held} ({percent(unused / held if held else 0)})",
        }
        pool = {"free": list(self.allocator.free_blocks), "slots": list(self.slots), "wrote": [], "read": []}
        return {"requests": requests, "counters": counters} | pool

    def begin(self, name: str, words: list[str]) -> None:
        """Add a request that holds nothing yet."""
        from mini_engine.kv.token_flat import FlatRequest  # here: it needs torch, and the site is built without

        self.requests[name], self.texts[name] = FlatRequest(list(range(len(words)))), words

    def arrive(self, name: str, text: str) -> None:
        words = words_of(text)
        if name in self.requests:
            raise UserError(f"request {name} is in the pool already; let it end first")
        if not words:
            raise UserError(f"request {name} has no words; type a prompt")
        self.begin(name, words)
        self.fill(name, f"Request {name} arrives with {plural(len(words), 'token')}:")

    def reserve(self, name: str, length: int) -> tuple[str, list[int]]:
        """Reserve slots for a request's first `length` tokens and write them. Return a sentence and these slots.

        Raises:
            OutOfBlocks: there is no room; nothing was changed.
        """
        from mini_engine.kv.token_flat import reserve

        request = self.requests[name]
        before, written = len(request.blocks), request.cur_len
        reserve(request, self.allocator, length)
        wrote = request.slot_indices[written:length]
        for position, slot in zip(range(written, length), wrote, strict=True):
            self.slots[slot] = f"{name}{position}"
        request.cur_len = length
        new = request.blocks[before:]
        return f"it takes {plural(len(new), 'block')}, {listed(new)}." if new else "its last block has room.", wrote

    def fill(self, name: str, begins: str) -> bool:
        """Reserve the blocks that a request needs and write its tokens. Return True if there was room."""
        length = len(self.texts[name])
        try:
            took, wrote = self.reserve(name, length)
        except OutOfBlocks as error:
            said = f"{begins} OutOfBlocks: {error}. {name} waits, unchanged."
            self.show(said, f"{ALLOCATOR}.alloc_blocks")
            return False
        unused = len(self.requests[name].slot_indices) - length
        left = f" {plural(unused, 'slot')} {'is' if unused == 1 else 'are'} unused." if unused else ""
        self.show(f"{begins} {took}{left}", RESERVE, wrote=wrote)
        return True

    def leave(self, name: str) -> None:
        request = self.requests.pop(name, None)
        if request is None:
            return
        del self.texts[name]
        blocks = list(request.blocks)
        self.allocator.free(blocks)
        freed = f"blocks {listed(blocks)} are free again" if blocks else "it held no block"
        said = f"{name} has ended: {freed}. The last one freed goes out first."
        self.show(said, f"{ALLOCATOR}.free")
        for other, each in list(self.requests.items()):
            if each.cur_len < len(self.texts[other]):
                self.fill(other, f"{other} has waited for blocks:")

    def step(self) -> None:
        """Decode one token for each request that holds blocks."""
        for name in [name for name, each in self.requests.items() if each.cur_len == len(self.texts[name])]:
            self.texts[name].append("·")
            if not self.fill(name, f"{name} decodes its token {len(self.texts[name]) - 1}:"):
                self.texts[name].pop()
