"""Course machinery. Lesson 2's trace: requests arrive and finish in a pool of six blocks."""

from scripts.traces.tape import Tape, ask, listed, plural, ranges

from mini_engine.errors import OutOfBlocks

BLOCK_SIZE, NUM_BLOCKS = 4, 6
ALLOCATOR = "mini_engine/kv/allocator.py::BlockAllocator"
PAGED = "mini_engine/kv/token_flat.py"
PROMPTS = {
    "A": "The capital of France is",
    "B": "Once upon a time",
    "C": "Count: one, two, three,",
    "D": "The opposite of hot is cold. The opposite",
}


def tape() -> Tape:
    scene = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS}
    return Tape("l2-pool", "l2_token_flat/pool.trace.js", "pool", "One pool, handed out in blocks", scene, poster=15)


class Player:
    """Steps requests over one real pool, one at a time; each step is one or two frames."""

    def __init__(self, tape: Tape) -> None:
        from mini_engine.checkpoint.weights import load_model
        from mini_engine.kv.allocator import BlockAllocator
        from mini_engine.kv.token_flat import KvPool
        from mini_engine.pocket import POCKET_DIR
        from mini_engine.text.tokenizer import Tokenizer

        self.tape = tape
        self.model, self.tokenizer = load_model(POCKET_DIR), Tokenizer(POCKET_DIR)
        self.pool = KvPool(self.model.config, BLOCK_SIZE * NUM_BLOCKS)
        self.allocator = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE, reserved=0)
        self.slots: list[str | None] = [None] * (BLOCK_SIZE * NUM_BLOCKS)
        self.running: dict[str, Running] = {}

    def show(self, say: str, question=None, wrote=(), read=(), *, code: str) -> None:
        requests = [running.state(self.tokenizer) for running in self.running.values()]
        free = list(self.allocator.free_blocks)
        state = {"requests": requests, "free": free, "slots": list(self.slots)}
        self.tape.frame(say, question, code, **state, wrote=list(wrote), read=list(read))

    def arrive(self, name: str) -> "Running":
        running = self.running[name] = Running(name, self)
        return running

    def leave(self, name: str) -> list[int]:
        """End a request and return the blocks it held."""
        running = self.running.pop(name)
        blocks = list(running.request.blocks)
        running.sequence.release()
        return blocks

    def texts(self, ids) -> list[str]:
        return [self.tokenizer.token_bytes[token].decode("utf-8", "replace").strip() for token in ids]


class Running:
    """One request, driven from `plan` to `commit` as lesson 0's loop does."""

    def __init__(self, name: str, player: Player) -> None:
        from mini_engine.kv.token_flat import FlatRequest, PagedSequence

        self.name, self.player = name, player
        self.token_ids = player.tokenizer.encode(PROMPTS[name])
        self.request = FlatRequest(list(self.token_ids))
        self.sequence = PagedSequence(self.request, player.pool, player.allocator)

    def state(self, tokenizer) -> dict:
        return {
            "name": self.name,
            "words": self.player.texts(self.token_ids),
            "blocks": list(self.request.blocks),
            "slots": len(self.request.slot_indices),
            "written": self.request.cur_len,
        }

    def plan(self) -> list[int]:
        """Reserve slots for the next step and return the new blocks."""
        before = len(self.request.blocks)
        self.meta = self.sequence.plan(self.token_ids)
        return self.request.blocks[before:]

    def run(self) -> tuple[list[int], list[int], str]:
        """Run the model. Return the slots written, the slots read and the word chosen."""
        import torch

        from mini_engine.engine.loop import next_token

        meta = self.meta
        with torch.inference_mode():
            fed = torch.tensor(self.token_ids)[meta.positions]
            logits = self.player.model(fed, self.player.pool, meta, rows=torch.tensor([len(fed) - 1]))
        wrote = meta.slot_mapping.tolist()
        for slot, position in zip(wrote, meta.positions.tolist(), strict=True):
            self.player.slots[slot] = f"{self.name}{position}"
        self.sequence.commit(meta)
        self.token_ids.append(next_token(logits[0]))
        return wrote, meta.kv_indices.tolist(), self.player.texts(self.token_ids[-1:])[0]


def record(tape: Tape) -> None:
    """Record the story; its captions come from what the pool and the allocator did."""
    player = Player(tape)
    player.show(
        f"A pool of {NUM_BLOCKS} blocks with {BLOCK_SIZE} slots each. A slot holds the keys and values of one token. "
        "All blocks are on the free list.",
        code=f"{PAGED}::KvPool",
    )
    prefill(player, "A")
    prefill(player, "B")
    for name in "AAB":
        decode(player, name)
    decode(player, "A")
    decode(player, "A", is_question=True)
    end(player, "A", "A has reached its maximum length")
    prefill(player, "C", is_question=True)
    decode(player, "C")
    refused(player, "D")
    decode(player, "B")
    end(player, "B", "B has ended")
    prefill(player, "D", again=True)
    end(player, "C", "C has ended")
    end(player, "D", "D has ended")


def prefill(player: Player, name: str, is_question: bool = False, again: bool = False) -> None:
    """Show two frames: the request takes blocks, then one step writes the whole prompt."""
    running = player.running[name] if again else player.arrive(name)
    count = len(running.token_ids)
    expected = list(player.allocator.free_blocks)
    blocks = running.plan()
    tail = (
        ""
        if len(blocks) * BLOCK_SIZE == count
        else f" {plural(len(blocks) * BLOCK_SIZE - count, 'slot')} of the last one will stay free."
    )
    question = None
    if len(player.running) == 1 and not again:
        why = f"{count} / {BLOCK_SIZE}, rounded up. Only the last block of a request can be partly filled."
        question = ask(
            f"Request A arrives with {count} tokens. How many blocks will it take?", len(blocks), (1, 2, 5), why
        )
    elif is_question:
        why = "The block that was freed last is handed out first: its bytes are most likely still in a cache."
        wrong = (listed(expected[: len(blocks)]), listed(sorted(expected)[: len(blocks)]), listed(sorted(blocks)))
        question = ask(
            f"{name} needs {plural(len(blocks), 'block')}. Which ones will it get?", listed(blocks), wrong, why
        )
    first = f"Now {name} fits:" if again else f"Request {name} arrives with {count} tokens:"
    player.show(
        f"{first} it takes {plural(len(blocks), 'block')}, {listed(blocks)}.{tail}", question, code=f"{PAGED}::reserve"
    )
    wrote, _, word = running.run()
    player.show(
        f"Prefill: one step writes all {count} tokens, to slots {ranges(wrote)}. The model chooses “{word}”, "
        "which has no keys and values yet.",
        wrote=wrote,
        code=f"{PAGED}::KvPool.set_kv",
    )


def decode(player: Player, name: str, is_question: bool = False) -> None:
    """Show one frame, or two if the request takes a block first."""
    running = player.running[name]
    position = running.request.cur_len
    free = player.allocator.free_blocks[::-1]
    blocks = running.plan()
    if blocks:
        question = None
        if is_question:
            why = "The next one on the free list will do: the request's own list of blocks keeps the order."
            wrong = ["none; it waits", f"{running.request.blocks[-2] + 1}, the neighbour", *free[1:2]]
            question = ask(f"{name}'s blocks are full. Which block does it get?", blocks[0], wrong, why)
        player.show(
            f"Token {position} of {name} needs a slot, and its blocks are full. It takes block {blocks[0]}. "
            "A request's blocks need not be adjacent.",
            question,
            code=f"{PAGED}::reserve",
        )
    wrote, read, word = running.run()
    block, offset = divmod(wrote[0], BLOCK_SIZE)
    player.show(
        f"Decode: {name} feeds one token, position {position}. Its slot is {block} × {BLOCK_SIZE} + {offset} = "
        f"{wrote[0]}. "
        f"Attention gathers slots {ranges(read)}, in this order. Next word: “{word}”.",
        wrote=wrote,
        read=read,
        code=f"{PAGED}::KvPool.attend",
    )


def refused(player: Player, name: str) -> None:
    """Show a request that does not fit."""
    running = player.arrive(name)
    free = player.allocator.num_free
    need = -(-len(running.token_ids) // BLOCK_SIZE)
    try:
        running.plan()
    except OutOfBlocks as error:
        taken = len(running.request.blocks)
        why = "A call that fails changes nothing. Part of a reservation would be of no use."
        question = ask(
            f"{name} asks for {need} blocks, with {free} free. How many does it hold afterwards?",
            taken,
            (0, free, need),
            why,
        )
        said = f"OutOfBlocks: {error}. Nothing was changed: {name} holds {plural(taken, 'block')}."
        player.show(said, question, code=f"{ALLOCATOR}.alloc_blocks")


def end(player: Player, name: str, because: str) -> None:
    """Show a request ending and returning its blocks."""
    blocks = player.leave(name)
    player.show(
        f"{because}: blocks {listed(blocks)} are freed. {plural(player.allocator.num_free, 'block')} of {NUM_BLOCKS} "
        + ("are free, as at the start. " if not player.running else "are free now. ")
        + "The old keys and values stay there until they are overwritten, and no request reads them.",
        code=f"{ALLOCATOR}.free",
    )
