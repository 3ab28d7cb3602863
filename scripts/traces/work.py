"""Course machinery. Lesson 0's trace: the rows that each step computes without a cache, beside those of lesson 1."""

from typing import Any

from scripts.traces.tape import Tape, ask, plural

PROMPT, ANSWER = "The capital of France is", 12
LOOP = "mini_engine/engine/loop.py::generate"
PLANS = ("mini_engine/kv/no_cache.py::Recompute.plan", "mini_engine/kv/contiguous.py::CachedSequence.plan")


def tape() -> Tape:
    scene = {"names": ["no cache", "K and V kept"], "steps": ANSWER}
    return Tape("l0-work", "l0_the_loop/work.trace.js", "work", "The work of each step", scene, 12)


class Counting:
    """A store that passes every call on. rows: the positions whose K and V were written, step by step, in layer 0."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.rows: list[list[int]] = []

    def set_kv(self, layer, slot_mapping, k, v) -> None:
        if layer == 0:
            self.rows.append(slot_mapping.tolist())  # in both lessons a row's number is the token's position
        self.store.set_kv(layer, slot_mapping, k, v)

    def attend(self, layer, q, meta):
        return self.store.attend(layer, q, meta)


def record(tape: Tape) -> None:
    """Answer the same prompt with both stores, and show their steps side by side."""
    from mini_engine.checkpoint.weights import load_model
    from mini_engine.engine.loop import generate
    from mini_engine.kv.contiguous import CachedSequence, ContiguousKv
    from mini_engine.kv.no_cache import NoCache, Recompute
    from mini_engine.pocket import POCKET_DIR
    from mini_engine.text.tokenizer import Tokenizer

    tokenizer, model = Tokenizer(POCKET_DIR), load_model(POCKET_DIR)
    prompt_ids = tokenizer.encode(PROMPT)
    work = Work(tape, [tokenizer.decode([token]).strip() for token in prompt_ids])
    kept = ContiguousKv(model.config, len(prompt_ids) + ANSWER)
    runs = [(NoCache(), Recompute()), (kept, CachedSequence(kept))]
    work.opening()
    stores = [Counting(store) for store, _ in runs]
    answers = [
        generate(model, store, sequence, prompt_ids, ANSWER) for store, (_, sequence) in zip(stores, runs, strict=True)
    ]
    if answers[0] != answers[1]:
        raise ValueError("with and without a cache the tokens differ")
    words = [tokenizer.decode([token]).strip() for token in answers[0]]
    for step, (fed, new) in enumerate(zip(*(store.rows for store in stores), strict=True), 1):
        work.step(step, fed, new, words[:step])
    work.sum_up()


class Work:
    """The steps of both runs, as far as they are shown. prompt: its tokens as words."""

    def __init__(self, tape: Tape, prompt: list[str]) -> None:
        self.tape, self.prompt = tape, prompt
        self.rows: list[list[list[int]]] = [[], []]  # of each run: the positions computed in each step

    @property
    def counts(self) -> list[int]:
        """The rows computed so far, by each run."""
        return [sum(map(len, rows)) for rows in self.rows]

    @property
    def again(self) -> list[int]:
        """How many of them had been computed before, by each run."""
        return [count - len(set().union(*rows)) for count, rows in zip(self.counts, self.rows, strict=True)]

    def show(self, say: str, question=None, answer=(), *, code: str) -> None:
        spans = [[[rows[0], rows[-1] + 1] for rows in run] for run in self.rows]
        state = {"prompt": self.prompt, "answer": list(answer), "counts": self.counts, "again": self.again}
        self.tape.frame(say, question, code=code, spans=spans, **state)

    def opening(self) -> None:
        self.show(
            f"The same prompt, {plural(len(self.prompt), 'token')}, is continued twice: by this lesson's loop, and by "
            "the same loop with lesson 1's cache. A line of boxes is a step, a full box a row that the model computes.",
            code="mini_engine/kv/no_cache.py::Recompute",
        )

    def step(self, number: int, fed: list[int], new: list[int], words: list[str]) -> None:
        """Add a step: the positions that each run computed, and the answer with the token chosen in this step."""
        question = self.question(number, fed, new)
        for run, rows in zip(self.rows, (fed, new), strict=True):
            run.append(rows)
        chosen = f"Both choose “{words[-1]}”."
        if number == 1:
            say = f"Step 1: both feed the {len(fed)} tokens of the prompt. {chosen}"
        else:
            say = (
                f"Step {number}: without a cache {len(fed)} tokens go through the model, {len(fed) - len(new)} of them "
                f"computed before. With K and V kept, {plural(len(new), 'token')}. {chosen}"
            )
        self.show(say, question, words, code=LOOP if number == 1 else PLANS[number == 3])

    def question(self, number: int, fed: list[int], new: list[int]):
        total = [count + len(rows) for count, rows in zip(self.counts, (fed, new), strict=True)]
        if number == 2:
            why = "Nothing was kept, so the prompt is fed again, and behind it the token that was just chosen."
            return ask(
                "Step 2, without a cache. How many tokens does it feed?", len(fed), (1, len(self.prompt), 0), why
            )
        if number == 3:
            why = "K and V of all earlier tokens are in the cache. Only the newest token has none yet."
            return ask("And step 3 with the cache?", len(new), (len(fed), 2, 3), why)
        if number == 7:
            why = f"One more in each step: {' + '.join(str(len(rows)) for rows in [*self.rows[0], fed])}."
            wrong = (len(fed), total[1], number * len(fed))
            return ask("How many tokens has the loop without a cache fed after step 7?", total[0], wrong, why)
        return None

    def sum_up(self) -> None:
        (without, kept), words = self.counts, self.tape.frames[-1]["answer"]
        self.show(
            f"{plural(len(words), 'token')} chosen. Without a cache the model computed {without} rows, {self.again[0]} "
            f"of them for tokens that it had computed before; with K and V kept, {kept}. The triangle grows with the "
            "square of the length, its edge with the length.",
            answer=words,
            code=PLANS[1],
        )
