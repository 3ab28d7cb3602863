"""Course machinery. Lesson 1's trace: caches that are reserved at full length, and how few of their rows are used."""

from typing import Any

from scripts.traces.tape import Tape, ask, listed, plural

ROWS, PLACES = 16, 3  # rows of a cache, and caches for which there is memory
PROMPTS = {
    "A": "The capital of France is",
    "B": "Once upon a time",
    "C": "Count: one, two, three,",
    "D": "The opposite of hot is",
}
LENGTHS = {"A": 8, "B": 4, "C": 5, "D": 8}
NEXT_PROMPT = "The capital of Japan is a"
KV = "mini_engine/kv/contiguous.py"


def tape() -> Tape:
    scene = {"rows": ROWS, "places": PLACES}
    return Tape(
        "l1-reserved", "l1_contiguous/reserved.trace.js", "reserved", "What is reserved, what is used", scene, 7
    )


class Running:
    """A request in a cache of its own, driven as lesson 0's loop does it."""

    def __init__(self, memory: "Memory", name: str) -> None:
        from mini_engine.kv.contiguous import CachedSequence, ContiguousKv

        self.memory, self.name = memory, name
        self.token_ids = memory.tokenizer.encode(PROMPTS[name])
        self.left = LENGTHS[name]
        self.sequence = CachedSequence(ContiguousKv(memory.model.config, ROWS))
        self.wrote: list[int] = []

    def step(self) -> None:
        """Feed what is not in the cache yet, and append the best next token."""
        import torch

        from mini_engine.engine.loop import next_token

        meta = self.sequence.plan(self.token_ids)
        self.wrote = meta.slot_mapping.tolist()
        fed = torch.tensor(self.token_ids)[meta.positions]
        with torch.inference_mode():
            logits = self.memory.model(fed, self.sequence.kv, meta, rows=torch.tensor([len(fed) - 1]))
        self.sequence.commit(meta)
        self.token_ids.append(next_token(logits[0]))
        ends = self.token_ids[-1] in self.memory.model.config.eos_token_ids
        self.left = 0 if ends else self.left - 1

    @property
    def words(self) -> list[str]:
        """The tokens as words; one that the tokenizer shows as nothing is an end token."""
        return [self.memory.tokenizer.decode([token]).strip() or "end" for token in self.token_ids]

    def state(self) -> dict[str, Any]:
        return {"name": self.name, "words": self.words, "used": self.sequence.cur_len, "wrote": self.wrote}


class Memory:
    """Memory with room for three caches, and the requests in it."""

    def __init__(self, tape: Tape) -> None:
        from mini_engine.checkpoint.weights import load_model
        from mini_engine.pocket import POCKET_DIR
        from mini_engine.text.tokenizer import Tokenizer

        self.tape = tape
        self.model, self.tokenizer = load_model(POCKET_DIR), Tokenizer(POCKET_DIR)
        self.places: list[Running | None] = [None] * PLACES
        self.waiting: list[str] = []

    @property
    def running(self) -> list[Running]:
        return [place for place in self.places if place is not None]

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes reserved and used, as lesson 1's smoke script counts them."""
        per_token = self.model.config.kv_bytes_per_token(self.model.dtype)
        used = sum(one.sequence.cur_len for one in self.running)
        return {"reserved": sum(one.sequence.kv.bytes for one in self.running), "used": used * per_token}

    def show(self, say: str, question=None, *, code: str) -> None:
        caches = [place.state() if place else None for place in self.places]
        self.tape.frame(say, question, code=code, caches=caches, waiting=list(self.waiting), bytes=self.bytes)
        for one in self.running:
            one.wrote = []

    def arrive(self, name: str) -> Running:
        """Reserve a cache for a request. ValueError if all places are taken."""
        place = self.places.index(None)
        one = self.places[place] = Running(self, name)
        return one

    def round(self) -> list[Running]:
        """Run a step of each answer that goes on. Return those that have ended with it."""
        stepped = [one for one in self.running if one.left]
        for one in stepped:
            one.step()
        return [one for one in stepped if not one.left]

    @property
    def unused(self) -> int:
        """Rows that are reserved and hold nothing."""
        return sum(ROWS - one.sequence.cur_len for one in self.running)


def record(tape: Tape) -> None:
    """Run four requests where three caches fit, and then another prompt in a cache that is still there."""
    memory = Memory(tape)
    first = alone(memory)
    crowd(memory)
    used = {}
    while any(one.left for one in memory.running):
        ended = memory.round()
        used |= {one.name: one.sequence.cur_len for one in ended}
        show_round(memory, ended)
        for one in ended:
            if one is not first:
                leave(memory, one)
    next_prompt(memory, first)
    rows = ROWS * len(used)
    memory.show(
        f"{plural(len(used), 'answer')} have reserved {rows} rows and written {sum(used.values())}: "
        f"{100 - 100 * sum(used.values()) / rows:.0f} % of the memory was reserved for tokens that never came.",
        code=f"{KV}::ContiguousKv",
    )


def alone(memory: Memory) -> Running:
    """Show the first request: its reservation, its prefill, its first decode."""
    one = memory.arrive("A")
    count, size = len(one.token_ids), memory.bytes["reserved"] / 1024
    memory.show(
        f"A arrives with {count} tokens. Before the first of them is computed its cache is reserved, with room for the "
        f"longest text: {ROWS} rows here, {size:.0f} KiB. Memory has room for {PLACES} such caches.",
        code=f"{KV}::ContiguousKv",
    )
    one.step()
    chosen, length = one.words[-1], one.sequence.cur_len
    why = f"“{chosen}” is known, but it has not been through the model: the next step writes its K and V."
    memory.show(
        f"Prefill: one step writes rows 0\u00a0…\u00a0{one.wrote[-1]} and chooses “{chosen}”. cur_len is {length}: "
        f"{why[0].lower() + why[1:]}",
        ask(f"The prefill of {count} tokens has chosen a token. What is cur_len?", length, (count + 1, 1, ROWS), why),
        code=f"{KV}::CachedSequence.commit",
    )
    one.step()
    memory.show(
        f"Decode: “{chosen}” is fed, its K and V go to row {listed(one.wrote)}, and attention reads rows 0\u00a0…\u00a0"
        f"{one.sequence.cur_len - 1}.",
        code=f"{KV}::ContiguousKv.attend",
    )
    return one


def crowd(memory: Memory) -> None:
    """Fill all places, and let one more request come."""
    for name in "BC":
        one = memory.arrive(name)
        one.step()
        memory.show(
            f"{name} arrives. It reserves {ROWS} rows and writes {one.sequence.cur_len}.", code=f"{KV}::ContiguousKv"
        )
    memory.waiting = ["D"]
    need, unused = len(memory.tokenizer.encode(PROMPTS["D"])) + LENGTHS["D"] - 1, memory.unused
    why = f"It is about what is reserved, not what is used: {unused} rows hold nothing, and each belongs to a cache."
    memory.show(
        f"D arrives and would write {need} rows. {unused} rows hold nothing, but all are reserved. D waits.",
        ask(
            f"D arrives and would write {need} rows in all. {unused} reserved rows hold nothing. Can it start?",
            "no, it waits",
            (f"yes, in {need} of those rows",),
            why,
        ),
        code=f"{KV}::ContiguousKv",
    )


def show_round(memory: Memory, ended: list[Running]) -> None:
    steps = [one.name for one in memory.running if one.wrote]
    rows = ROWS * len(memory.running)
    said = [f"{listed(steps)} {'writes a row' if len(steps) == 1 else 'write a row each'}."]
    said.append(f"{rows - memory.unused} of {rows} reserved rows are in use.")
    question = None
    for one in ended:
        used = one.sequence.cur_len
        said.append(f"{one.name} has ended: of its {ROWS} rows {ROWS - used} were never used.")
        why = "The chosen token of the last step is not fed any more, so it has no row."
        text = f"This step ends {one.name}'s answer. How many of its {ROWS} rows were used in the end?"
        if len(ended) == 1 and one.name == "B":
            question = ask(text, used, (used + 1, ROWS), why)
    memory.show(" ".join(said), question, code=f"{KV}::ContiguousKv.set_kv")


def leave(memory: Memory, one: Running) -> None:
    """Give a cache's memory back, and let a waiting request have it."""
    memory.places[memory.places.index(one)] = None
    if not memory.waiting:
        return
    name = memory.waiting.pop()
    came = memory.arrive(name)
    came.step()
    memory.show(
        f"{one.name}'s cache is given back whole, and {name} gets the place: {ROWS} rows reserved, "
        f"{came.sequence.cur_len} written.",
        code=f"{KV}::ContiguousKv",
    )


def next_prompt(memory: Memory, one: Running) -> None:
    """Show a prompt that shares its first tokens with the text in a cache."""
    from mini_engine.kv.contiguous import reusable_prefix

    cached, ids = one.token_ids[: one.sequence.cur_len], memory.tokenizer.encode(NEXT_PROMPT)
    count = reusable_prefix(cached, ids)
    equal = sum(old == new for old, new in zip(cached, ids, strict=False))
    one.sequence.truncate(count)
    one.token_ids = ids
    why = "K and V of a token depend on all tokens before it, so nothing behind the first difference can be reused."
    memory.show(
        f"A's cache gets another prompt, “{NEXT_PROMPT}”. Its first {count} tokens are in there: truncate({count}) "
        f"keeps those rows and forgets the others.",
        ask(
            f"A's cache gets the prompt “{NEXT_PROMPT}”, and {equal} of its tokens are where they were. How many rows "
            "can stay?",
            count,
            (equal, 0, len(ids)),
            why,
        ),
        code=f"{KV}::reusable_prefix",
    )
    one.step()
    memory.show(
        f"Its prefill feeds the other {plural(len(one.wrote), 'token')}, into rows {listed(one.wrote)}, over what was "
        "there.",
        code=f"{KV}::CachedSequence.plan",
    )
