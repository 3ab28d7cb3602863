"""Course machinery. Lesson 2's trace: requests arrive and finish in a pool of six blocks."""

from typing import Any

from scripts.traces.tape import Tape, ask, listed, plural, ranges

from mini_engine.base.errors import OutOfBlocks
from mini_engine.engine.loop import generate
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.token_flat import FlatKvPool, FlatRequest, PagedSequence

BLOCK_SIZE, NUM_BLOCKS = 4, 6
ALLOCATOR = "mini_engine/kv/allocator.py::BlockAllocator"
PAGED = "mini_engine/kv/token_flat.py"
PROMPTS = {
    "A": "The capital of France is",
    "B": "Once upon a time",
    "C": "Count: one, two, three,",
    "D": "The opposite of hot is cold. The opposite",
}


class Running:
    """One request, run by lesson 0's loop a token at a time."""

    def __init__(self, name: str, tape: "Pool") -> None:
        self.name, self.tape = name, tape
        self.token_ids = tape.tokenizer.encode(PROMPTS[name])
        self.request = FlatRequest(list(self.token_ids))
        self.sequence = PagedSequence(self.request, tape.pool, tape.allocator)

    def state(self) -> dict[str, Any]:
        request = self.request
        held = {"blocks": list(request.blocks), "slots": len(request.slot_indices), "written": request.cur_len}
        return {"name": self.name, "words": self.tape.words(self.token_ids), **held}

    def reserve(self) -> list[int]:
        """Reserve slots for the next step and return the new blocks. The loop, which plans again, takes no others."""
        before = len(self.request.blocks)
        self.meta = self.sequence.plan(self.token_ids)
        return self.request.blocks[before:]

    def run(self) -> tuple[list[int], list[int], str]:
        """Run a step. Return the slots written, the slots read and the word chosen."""
        wrote, read = self.meta.slot_mapping.tolist(), self.meta.kv_indices.tolist()
        for slot, position in zip(wrote, self.meta.positions.tolist(), strict=True):
            self.tape.slots[slot] = f"{self.name}{position}"
        chosen = generate(self.tape.model, self.tape.pool, self.sequence, self.token_ids, 1)
        self.token_ids += chosen
        return wrote, read, self.tape.words(chosen)[0]


class Pool(Tape):
    """One real pool, and the requests in it, of which one at a time takes a step."""

    def __init__(self) -> None:
        file, title = "l2_token_flat/pool.trace.js", "One pool, handed out in blocks"
        super().__init__("l2-pool", file, "pool", title, 15, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
        self.pool = FlatKvPool(self.model.config, BLOCK_SIZE * NUM_BLOCKS)
        self.allocator = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE, reserved=0)
        self.slots: list[str | None] = [None] * (BLOCK_SIZE * NUM_BLOCKS)
        self.running: dict[str, Running] = {}

    def state(self) -> dict[str, Any]:
        requests = [running.state() for running in self.running.values()]
        free = list(self.allocator.free_blocks)
        return {"requests": requests, "free": free, "slots": list(self.slots), "wrote": [], "read": []}

    def record(self) -> None:
        self.show(
            f"A pool of {NUM_BLOCKS} blocks, all free, with {BLOCK_SIZE} slots each. A slot holds the K and V of one "
            "token.",
            f"{PAGED}::FlatKvPool",
        )
        self.prefill("A")
        self.prefill("B")
        for name in "AABA":
            self.decode(name)
        self.decode("A", is_question=True)
        self.end("A", "A has ended")
        self.prefill("C", is_question=True)
        self.decode("C")
        self.refused("D")
        self.decode("B")
        self.end("B", "B has ended")
        self.prefill("D", again=True)
        self.end("C", "C has ended")
        self.end("D", "D has ended")

    def arrive(self, name: str) -> Running:
        running = self.running[name] = Running(name, self)
        return running

    def prefill(self, name: str, is_question: bool = False, again: bool = False) -> None:
        """Show two frames: the request takes blocks, then one step writes the whole prompt."""
        running = self.running[name] if again else self.arrive(name)
        count = len(running.token_ids)
        expected = list(self.allocator.free_blocks)
        blocks = running.reserve()
        took, unused = plural(len(blocks), "block"), len(blocks) * BLOCK_SIZE - count
        tail = f" {plural(unused, 'slot')} of the last one stay{'s' if unused == 1 else ''} free." if unused else ""
        question = None
        if len(self.running) == 1 and not again:
            why = f"{count} / {BLOCK_SIZE}, rounded up. Only the last block of a request can be partly filled."
            text = f"Request A arrives with {count} tokens. How many blocks will it take?"
            question = ask(text, len(blocks), (1, 2, 5), why)
        elif is_question:
            why = "The block that was freed last is handed out first: its bytes are most likely still in a cache."
            wrong = (listed(expected[: len(blocks)]), listed(sorted(expected)[: len(blocks)]), listed(sorted(blocks)))
            question = ask(f"{name} needs {took}. Which ones will it get?", listed(blocks), wrong, why)
        first = f"Now {name} fits:" if again else f"Request {name} arrives with {count} tokens:"
        self.show(f"{first} it takes {took}, {listed(blocks)}.{tail}", f"{PAGED}::reserve", question)
        wrote, _, word = running.run()
        self.show(
            f"Prefill: one step writes all {count} tokens, to slots {ranges(wrote)}, and chooses “{word}”.",
            f"{PAGED}::FlatKvPool.set_kv",
            wrote=wrote,
        )

    def decode(self, name: str, is_question: bool = False) -> None:
        """Show one frame, or two if the request takes a block first."""
        running = self.running[name]
        position = running.request.cur_len
        free = self.allocator.free_blocks[::-1]
        if blocks := running.reserve():
            question = None
            if is_question:
                why = "The next one on the free list will do: the request's own list of blocks keeps the order."
                wrong = ["none; it waits", f"{running.request.blocks[-2] + 1}, the neighbour", *free[1:2]]
                question = ask(f"{name}'s blocks are full. Which block does it get?", blocks[0], wrong, why)
            self.show(
                f"{name}'s blocks are full, so its token {position} takes block {blocks[0]}. Blocks need not be "
                "adjacent.",
                f"{PAGED}::reserve",
                question,
            )
        wrote, read, word = running.run()
        block, offset = divmod(wrote[0], BLOCK_SIZE)
        self.show(
            f"{name} feeds token {position}: slot {block} × {BLOCK_SIZE} + {offset} = {wrote[0]}. Attention gathers "
            f"{ranges(read)}. Next: “{word}”.",
            f"{PAGED}::FlatKvPool.attend",
            wrote=wrote,
            read=read,
        )

    def refused(self, name: str) -> None:
        """Show a request that does not fit."""
        running, free = self.arrive(name), self.allocator.num_free
        need = -(-len(running.token_ids) // BLOCK_SIZE)
        try:
            running.reserve()
        except OutOfBlocks as error:
            taken = len(running.request.blocks)
            why = "A call that fails changes nothing. Part of a reservation would be of no use."
            text = f"{name} asks for {need} blocks, with {free} free. How many does it hold afterwards?"
            self.show(
                f"OutOfBlocks: {error}. Nothing was changed: {name} holds {plural(taken, 'block')}.",
                f"{ALLOCATOR}.alloc_blocks",
                ask(text, taken, (0, free, need), why),
            )

    def end(self, name: str, because: str) -> None:
        """Show a request ending and returning its blocks."""
        running = self.running.pop(name)
        blocks = list(running.request.blocks)
        running.sequence.release()
        self.show(
            f"{because}: blocks {listed(blocks)} are free, {self.allocator.num_free} of {NUM_BLOCKS}. "
            "Old K and V stay, but no request reads them.",
            f"{ALLOCATOR}.free",
        )
