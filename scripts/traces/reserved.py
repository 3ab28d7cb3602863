"""Course machinery. Lesson 1's trace: caches reserved at full length, and how few of their rows are used."""

from typing import Any

from scripts.traces.tape import Tape, ask, listed, plural
from scripts.traces.work import Counting

from mini_engine.engine.loop import generate
from mini_engine.kv.contiguous import CachedSequence, ContiguousKv, reusable_prefix

ROWS, PLACES = 16, 3  # rows of a cache, and caches for which there is memory
REQUESTS = {  # prompts, and the most tokens in their answers
    "A": ("The capital of France is", 8),
    "B": ("Once upon a time", 4),
    "C": ("Count: one, two, three,", 5),
    "D": ("The opposite of hot is", 8),
}
NEXT_PROMPT = "The capital of Japan is a"
KV = "mini_engine/kv/contiguous.py"


class Running:
    """A request in its own cache."""

    def __init__(self, tape: "Reserved", name: str) -> None:
        prompt, self.left = REQUESTS[name]
        self.tape, self.name, self.token_ids = tape, name, tape.tokenizer.encode(prompt)
        self.sequence = CachedSequence(ContiguousKv(tape.model.config, ROWS))
        self.store = Counting(self.sequence.kv)
        self.wrote: list[int] = []

    @property
    def used(self) -> int:
        """The rows of its cache that are written."""
        return self.sequence.cur_len

    def step(self) -> None:
        """Run the loop for one token: it feeds the tokens that are not in the cache yet."""
        model = self.tape.model
        self.token_ids += generate(model, self.store, self.sequence, self.token_ids, 1)
        self.wrote = self.store.rows[-1]
        self.left = 0 if self.token_ids[-1] in model.config.eos_token_ids else self.left - 1

    @property
    def words(self) -> list[str]:
        """The tokens as words; one that the tokenizer shows as nothing is an end token."""
        return [word or "end" for word in self.tape.words(self.token_ids)]


class Reserved(Tape):
    """Memory with room for three caches, and the requests in it."""

    def __init__(self) -> None:
        file, title = "l1_contiguous/reserved.trace.js", "What is reserved, what is used"
        super().__init__("l1-reserved", file, "reserved", title, 7, rows=ROWS, places=PLACES)
        self.places: list[Running | None] = [None] * PLACES
        self.waiting: list[str] = []

    @property
    def running(self) -> list[Running]:
        return [place for place in self.places if place is not None]

    @property
    def unused(self) -> int:
        """The number of rows that are reserved and hold nothing."""
        return sum(ROWS - one.used for one in self.running)

    def state(self) -> dict[str, Any]:
        caches = [
            place and {"name": place.name, "words": place.words, "used": place.used, "wrote": place.wrote}
            for place in self.places
        ]
        per_token = self.model.config.kv_bytes_per_token(self.model.dtype)
        reserved = sum(one.sequence.kv.bytes for one in self.running)
        used = sum(one.used for one in self.running) * per_token
        return {"caches": caches, "waiting": list(self.waiting), "bytes": {"reserved": reserved, "used": used}}

    def show(self, say: str, code: str = "", question=None, **state: Any) -> None:
        super().show(say, f"{KV}::{code}", question, **state)
        for one in self.running:
            one.wrote = []

    def arrive(self, name: str) -> Running:
        """Reserve a cache for a request. ValueError if all places are taken."""
        place = self.places.index(None)
        one = self.places[place] = Running(self, name)
        return one

    def record(self) -> None:
        """Run four requests where three caches fit, and then another prompt in a cache that is still there."""
        first = self.alone()
        self.crowd()
        used = {}
        while stepped := [one for one in self.running if one.left]:
            for one in stepped:
                one.step()
            ended = [one for one in stepped if not one.left]
            used |= {one.name: one.used for one in ended}
            self.show_round(ended)
            for one in ended:
                if one is not first:
                    self.leave(one)
        self.next_prompt(first)
        rows = ROWS * len(used)
        self.show(
            f"{plural(len(used), 'answer')} reserved {rows} rows and wrote {sum(used.values())}: "
            f"{100 - 100 * sum(used.values()) / rows:.0f} % was for tokens that never came.",
            "ContiguousKv",
        )

    def alone(self) -> Running:
        """Show the first request: its reservation, its prefill, its first decode."""
        one = self.arrive("A")
        count, size = len(one.token_ids), one.sequence.kv.bytes / 1024
        self.show(
            f"A arrives with {count} tokens. Its cache is reserved at once, for the longest text: {ROWS} rows, "
            f"{size:.0f} KiB.",
            "ContiguousKv",
        )
        one.step()
        chosen = one.words[-1]
        why = f"“{chosen}” is known, but it has not been through the model: the next step writes its K and V."
        text = f"The prefill of {count} tokens has chosen a token. What is cur_len?"
        self.show(
            f"Prefill writes rows 0\u00a0…\u00a0{one.wrote[-1]} and chooses “{chosen}”, which has no K and V yet: "
            f"cur_len is {one.used}.",
            "CachedSequence.commit",
            ask(text, one.used, (count + 1, 1, ROWS), why),
        )
        one.step()
        self.show(
            f"Decode: “{chosen}” is fed, its K and V go to row {listed(one.wrote)}, and attention reads rows "
            f"0\u00a0…\u00a0{one.used - 1}.",
            "ContiguousKv.attend",
        )
        return one

    def crowd(self) -> None:
        """Fill all places, and let one more request arrive."""
        for name in "BC":
            one = self.arrive(name)
            one.step()
            self.show(f"{name} arrives. It reserves {ROWS} rows and writes {one.used}.", "ContiguousKv")
        self.waiting, unused = ["D"], self.unused
        prompt, answer = REQUESTS["D"]
        need = len(self.tokenizer.encode(prompt)) + answer - 1
        text = f"D arrives and would write {need} rows in all. {unused} reserved rows hold nothing. Can it start?"
        why = (
            f"It is about what is reserved, not what is used: {unused} rows hold nothing, and each belongs to a cache."
        )
        self.show(
            f"D arrives and would write {need} rows. {unused} rows hold nothing, but all are reserved. D waits.",
            "ContiguousKv",
            ask(text, "no, it waits", (f"yes, in {need} of those rows",), why),
        )

    def show_round(self, ended: list[Running]) -> None:
        rows = ROWS * len(self.running)
        said = listed([one.name for one in self.running if one.wrote], "writes a row", "write a row each")
        said += f": {rows - self.unused} of {rows} rows in use."
        question = None
        for one in ended:
            said += f" {one.name} has ended, with {ROWS - one.used} rows never used."
            why = "The chosen token of the last step is not fed any more, so it has no row."
            text = f"This step ends {one.name}'s answer. How many of its {ROWS} rows were used in the end?"
            if len(ended) == 1 and one.name == "B":
                question = ask(text, one.used, (one.used + 1, ROWS), why)
        self.show(said, "ContiguousKv.set_kv", question)

    def leave(self, one: Running) -> None:
        """Free a cache's memory, and give it to a waiting request."""
        self.places[self.places.index(one)] = None
        if not self.waiting:
            return
        came = self.arrive(self.waiting.pop())
        came.step()
        self.show(
            f"{one.name}'s cache is given back whole, and {came.name} gets the place: {ROWS} rows reserved, "
            f"{came.used} written.",
            "ContiguousKv",
        )

    def next_prompt(self, one: Running) -> None:
        """Show a prompt that shares its first tokens with the text in a cache."""
        cached, ids = one.token_ids[: one.used], self.tokenizer.encode(NEXT_PROMPT)
        count = reusable_prefix(cached, ids)
        equal = sum(old == new for old, new in zip(cached, ids, strict=False))
        one.sequence.truncate(count)
        one.token_ids = ids
        why = "K and V of a token depend on all tokens before it, so nothing behind the first difference can be reused."
        text = f"A's cache gets the prompt “{NEXT_PROMPT}”, and {equal} of its tokens are where they were. "
        self.show(
            f"“{NEXT_PROMPT}” shares {count} tokens with A's cache: truncate({count}) keeps their rows.",
            "reusable_prefix",
            ask(f"{text}How many rows can stay?", count, (equal, 0, len(ids)), why),
        )
        one.step()
        self.show(
            f"Its prefill feeds the other {plural(len(one.wrote), 'token')}, into rows {listed(one.wrote)}, over what "
            "was there.",
            "CachedSequence.plan",
        )
