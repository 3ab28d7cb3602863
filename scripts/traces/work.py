"""Course machinery. Lesson 0's trace: the rows that each step computes without a cache, and with lesson 1's."""

from typing import Any

from scripts.traces.tape import Tape, ask, plural

from mini_engine.engine.loop import generate
from mini_engine.kv.contiguous import CachedSequence, ContiguousKv
from mini_engine.kv.no_cache import NoCache, Recompute

PROMPT, ANSWER = "The capital of France is", 12
LOOP = "mini_engine/engine/loop.py::generate"
PLANS = ("mini_engine/kv/no_cache.py::Recompute.plan", "mini_engine/kv/contiguous.py::CachedSequence.plan")


class Counting:
    """A store that forwards every call. rows: the positions whose K and V were written, step by step, in layer 0."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.rows: list[list[int]] = []

    def set_kv(self, layer, slot_mapping, k, v) -> None:
        if layer == 0:
            self.rows.append(slot_mapping.tolist())  # in both lessons a row's number is the token's position
        self.store.set_kv(layer, slot_mapping, k, v)

    def attend(self, layer, q, meta):
        return self.store.attend(layer, q, meta)


class Work(Tape):
    """The steps of both runs, as far as they are shown."""

    def __init__(self) -> None:
        scene = {"names": ["no cache", "K and V kept"], "steps": ANSWER}
        super().__init__("l0-work", "l0_the_loop/work.trace.js", "work", "The work of each step", 12, **scene)
        self.ids = self.tokenizer.encode(PROMPT)
        self.answer: list[str] = []
        self.rows: list[list[list[int]]] = [[], []]  # of each run: the positions computed in each step

    @property
    def counts(self) -> list[int]:
        """The rows computed so far, by each run."""
        return [sum(map(len, rows)) for rows in self.rows]

    @property
    def again(self) -> list[int]:
        """The number of them that had been computed before, by each run."""
        return [count - len(set().union(*rows)) for count, rows in zip(self.counts, self.rows, strict=True)]

    def state(self) -> dict[str, Any]:
        spans = [[[rows[0], rows[-1] + 1] for rows in run] for run in self.rows]
        counts = {"counts": self.counts, "again": self.again}
        return {"prompt": self.words(self.ids), "answer": list(self.answer), "spans": spans} | counts

    def record(self) -> None:
        """Answer the same prompt with both stores, and show their steps side by side."""
        kept = ContiguousKv(self.model.config, len(self.ids) + ANSWER)
        stores, sequences = (Counting(NoCache()), Counting(kept)), (Recompute(), CachedSequence(kept))
        self.show(
            "One prompt, continued without a cache and with lesson 1's. A full box is a computed row.",
            "mini_engine/kv/no_cache.py::Recompute",
        )
        runs = zip(stores, sequences, strict=True)
        answers = [generate(self.model, store, sequence, self.ids, ANSWER) for store, sequence in runs]
        if answers[0] != answers[1]:
            raise ValueError("with and without a cache the tokens differ")
        steps = zip(*(store.rows for store in stores), self.words(answers[0]), strict=True)
        for number, (fed, new, word) in enumerate(steps, 1):
            self.step(number, fed, new, word)
        self.sum_up()

    def step(self, number: int, fed: list[int], new: list[int], word: str) -> None:
        """Add a step: the positions that each run computed, and the token chosen in it."""
        question = self.question(number, fed, new)
        self.answer.append(word)
        for run, rows in zip(self.rows, (fed, new), strict=True):
            run.append(rows)
        if number == 1:
            say = f"Step 1: both feed the {len(fed)} tokens of the prompt."
        else:
            again = len(fed) - len(new)
            again = len(fed) - len(new)
            say = f"Step {number}: {len(fed)} tokens without a cache, {again} of them again; {len(new)} with a cache."
        self.show(f"{say} Both choose “{word}”.", LOOP if number == 1 else PLANS[number == 3], question)

    def question(self, number: int, fed: list[int], new: list[int]):
        total = [count + len(rows) for count, rows in zip(self.counts, (fed, new), strict=True)]
        if number == 2:
            why = "Nothing was kept, so the prompt is fed again, and behind it the token that was just chosen."
            text = "Step 2, without a cache. How many tokens does it feed?"
            return ask(text, len(fed), (1, len(self.ids), 0), why)
        if number == 3:
            why = "K and V of all earlier tokens are in the cache. Only the newest token has none yet."
            return ask("And step 3 with the cache?", len(new), (len(fed), 2, 3), why)
        if number == 7:
            why = f"One more in each step: {' + '.join(str(len(rows)) for rows in [*self.rows[0], fed])}."
            wrong = (len(fed), total[1], number * len(fed))
            return ask("How many tokens has the loop without a cache fed after step 7?", total[0], wrong, why)
        return None

    def sum_up(self) -> None:
        without, kept = self.counts
        self.show(
            f"{plural(len(self.answer), 'token')} took {without} rows without a cache, {self.again[0]} of them again, "
            f"and {kept} with one.",
            PLANS[1],
        )
