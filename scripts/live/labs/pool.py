"""Course machinery. Lesson 2's lab: prompts arrive and end in one pool; the lesson's own allocator and `reserve`."""

from typing import Any

from scripts.live.labs.events import Event, words_of
from scripts.live.labs.lab import Knob, Lab, Preset, percent
from scripts.live.labs.rules import pool_rules
from scripts.traces.tape import Tape, listed, plural

from mini_engine.errors import OutOfBlocks, UserError

ALLOCATOR = "mini_engine/kv/allocator.py::BlockAllocator"
RESERVE = "mini_engine/kv/token_flat.py::reserve"
CODE = (ALLOCATOR, f"{ALLOCATOR}.alloc_blocks", f"{ALLOCATOR}.free", RESERVE)


class Pool:
    """Requests in one pool. Each holds blocks, or waits until it can have them."""

    def __init__(self, tape: Tape, settings: dict[str, Any]) -> None:
        from mini_engine.kv.allocator import BlockAllocator

        self.tape, self.size = tape, settings["size"]
        self.allocator = BlockAllocator(settings["blocks"], self.size, reserved=0)
        self.requests: dict[str, Any] = {}
        self.words: dict[str, list[str]] = {}
        self.slots: list[str | None] = [None] * (settings["blocks"] * self.size)
        tape.scene |= {"block_size": self.size, "num_blocks": settings["blocks"]}
        self.show(
            f"A pool of {settings['blocks']} blocks with {self.size} slots each, all of them free.", code=ALLOCATOR
        )

    def happen(self, event: Event) -> None:
        if event.kind == "+":
            self.arrive(event.name, words_of(event.text))
        elif event.kind == "-":
            self.leave(event.name)
        else:
            self.step()

    @property
    def alive(self) -> list[str]:
        return list(self.requests)

    def finish(self) -> None:
        """Nothing is left to show."""

    def arrive(self, name: str, words: list[str]) -> None:
        from mini_engine.kv.token_flat import FlatRequest

        if name in self.requests:
            raise UserError(f"request {name} is in the pool already; let it end first")
        if not words:
            raise UserError(f"request {name} has no words; type a prompt")
        self.requests[name], self.words[name] = FlatRequest(list(range(len(words)))), list(words)
        self.fill(name, f"Request {name} arrives with {plural(len(words), 'token')}:")

    def fill(self, name: str, begins: str) -> bool:
        """Reserve what a request needs and write its tokens. Return whether there was room."""
        from mini_engine.kv.token_flat import reserve

        request, length = self.requests[name], len(self.words[name])
        before, written = len(request.blocks), request.cur_len
        try:
            reserve(request, self.allocator, length)
        except OutOfBlocks as error:
            said = f"{begins} OutOfBlocks: {error}. Nothing was changed, and {name} waits."
            self.show(said, code=f"{ALLOCATOR}.alloc_blocks")
            return False
        wrote = request.slot_indices[written:length]
        for position, slot in zip(range(written, length), wrote, strict=True):
            self.slots[slot] = f"{name}{position}"
        request.cur_len = length
        new, unused = request.blocks[before:], len(request.slot_indices) - length
        took = f"it takes {plural(len(new), 'block')}, {listed(new)}." if new else "its last block has room."
        left = f" {plural(unused, 'slot')} of its last block {'is' if unused == 1 else 'are'} unused." if unused else ""
        self.show(f"{begins} {took}{left}", wrote, code=RESERVE)
        return True

    def leave(self, name: str) -> None:
        request = self.requests.pop(name, None)
        if request is None:
            return
        del self.words[name]
        blocks = list(request.blocks)
        self.allocator.free(blocks)
        freed = f"blocks {listed(blocks)} are free again" if blocks else "it held no block"
        said = f"{name} has ended: {freed}. The next request gets the last one freed first."
        self.show(said, code=f"{ALLOCATOR}.free")
        for other, each in list(self.requests.items()):
            if each.cur_len < len(self.words[other]):
                self.fill(other, f"{other} has waited for blocks:")

    def step(self) -> None:
        """Each request that is written decodes one token."""
        for name in [name for name, each in self.requests.items() if each.cur_len == len(self.words[name])]:
            self.words[name].append("·")
            if not self.fill(name, f"{name} decodes its token {len(self.words[name]) - 1}:"):
                self.words[name].pop()

    def show(self, say: str, wrote=(), *, code: str) -> None:
        requests = [
            {"name": name, "words": list(self.words[name]), "blocks": list(each.blocks),
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
        self.tape.frame(say, code=code, requests=requests, free=list(self.allocator.free_blocks),
                        slots=list(self.slots), wrote=list(wrote), read=[], counters=counters)  # fmt: skip


LAB = Lab(
    name="pool",
    title="Your own requests in one pool",
    kind="pool",
    prompt="words",
    example="Once upon a time",
    verbs={"+": "Arrive", ".": "Decode a token each", "-": "End"},
    knobs=(Knob("blocks", "blocks", 6, 2, 12), Knob("size", "block size", 4, 1, 8)),
    presets=(
        Preset("Must a request's blocks be adjacent?",
               "+A=The capital of France is;+B=Once upon a time;.;.;.;-B;+C=Count one two three four", {}),
        Preset("What does a request that does not fit leave behind?",
               "+A=The capital of France is;+B=Once upon a time there was;"
               "+C=The opposite of hot is cold;+D=Hello there;-A", {}),
        Preset("How much is wasted with large blocks?",
               "+A=Hello;+B=The sea;+C=Once upon a time", {"blocks": 3, "size": 8}),
        Preset("And with blocks of one slot?",
               "+A=Hello;+B=The sea;+C=Once upon a time", {"blocks": 12, "size": 1}),
    ),
    modules=("mini_engine/kv/allocator.py", "mini_engine/kv/token_flat.py"),
    world=Pool,
    lesson="l2_token_flat",
    rules=pool_rules,
    code=CODE,
)  # fmt: skip
