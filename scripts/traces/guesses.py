"""Course machinery. Lesson 14's trace: drafts appear behind a text, the right ones stay, the KV of the others goes."""

from collections.abc import Sequence
from typing import Any

from scripts.traces.tape import Tape, ask, plural

BLOCK_SIZE, NUM_BLOCKS, MAX_DRAFTS = 4, 48, 8
SHOWN, BLOCKS_SHOWN = 27, 12  # of the text's tokens, and of its blocks: the last ones
ACTS = ("a times table", "a question asked twice")
LENGTHS = {ACTS[0]: 17, ACTS[1]: 48}
SPECULATOR = "mini_engine/speculation/speculator.py::Speculator"
LOOKUP = "mini_engine/speculation/lookup.py::LookupDrafter.propose"


def tape() -> Tape:
    scene = {"block_size": BLOCK_SIZE, "rows": 1 + MAX_DRAFTS, "acts": list(ACTS)}
    return Tape("l14-guesses", "l14_speculation/guesses.trace.js", "guesses", "Guess, verify, truncate", scene, 8)


def prompt_of(act: str) -> str:
    from scripts.l14_smoke import asked_twice

    return "1 times 5 is 5. 2 times 5 is 10." if act == ACTS[0] else asked_twice("What is a KV cache?")


class Act:
    """One prompt, answered by the pocket model with speculation, step by step."""

    def __init__(self, tape: Tape, name: str) -> None:
        from mini_engine.build import build_engine
        from mini_engine.checkpoint.weights import load_model
        from mini_engine.engine.sampling_params import SamplingParams
        from mini_engine.pocket import POCKET_DIR
        from mini_engine.speculation.options import Speculation
        from mini_engine.text.tokenizer import Tokenizer

        self.tape, self.name, self.tokenizer = tape, name, Tokenizer(POCKET_DIR)
        self.engine = build_engine(
            load_model(POCKET_DIR), backend="reference", num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE,
            enable_prefix_caching=False, speculate=Speculation(MAX_DRAFTS),
        )  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=LENGTHS[name])
        self.request = self.engine.add_request(name, self.tokenizer.encode(prompt_of(name)), params)
        self.steps = 0
        self.asked: set[tuple[int, int]] = set()

    def word(self, token_id: int) -> str:
        """Return a token as it is shown: a space as ␣, a line's end as ↵, a mark of the chat template by its name."""
        marks = {self.tokenizer.encode(mark)[0]: mark for mark in self.tokenizer.special_texts}
        text = marks.get(token_id) or self.tokenizer.decode([token_id])
        return text.replace(" ", "␣").replace("\n", "↵")

    def words(self, token_ids: Sequence[int]) -> list[str]:
        return [self.word(token_id) for token_id in token_ids]

    def show(
        self, say: str, question=None, drafts: Sequence[int] = (), fed=(), chosen=(), gained: int = 0, *, code: str
    ) -> None:
        """Add a frame. fed, chosen: the rows of the step. gained: how many of the newest tokens it has brought."""
        request, table = self.request, self.engine.scheduler.manager.tables.get(self.name)
        old = request.output_ids[: len(request.output_ids) - gained]
        text = {"prompt": request.prompt_ids, "old": old, "new": request.output_ids[len(old) :], "guess": drafts}
        num_slots = table.num_tokens if table else 0
        kept = min(num_slots, len(request.token_ids))
        words = [[word, kind] for kind, ids in text.items() for word in self.words(ids)]
        sizes = [min(BLOCK_SIZE, num_slots - first) for first in range(0, num_slots, BLOCK_SIZE)]
        blocks = [[max(0, min(size, kept - BLOCK_SIZE * i)), size] for i, size in enumerate(sizes)]
        self.tape.frame(
            say,
            question,
            code,
            act=self.name,
            hidden=len(words) - len(words[-SHOWN:]),
            text=words[-SHOWN:],
            num_blocks=len(blocks),
            blocks=blocks[-BLOCKS_SHOWN:],
            fed=self.words(fed),
            chosen=self.words(chosen),
            stand=gained if fed else 0,
            k=self.k,
            pause=self.adaptive.pause,
            steps=self.steps,
            tokens=len(request.output_ids),
        )

    def play(self) -> None:
        """Run the engine until the answer is complete."""
        quiet = 0  # tokens since the last frame, each from a step without a guess
        while not self.request.is_finished:
            chunks = self.engine.scheduler.schedule()
            drafts = chunks[0].drafts
            if drafts and quiet:
                self.quiet(quiet)
            if drafts:
                self.guess(drafts)
            sampled, fed = self.engine._run(chunks), chunks[0].token_ids
            before = len(self.request.output_ids)
            self.engine.scheduler.update(chunks, sampled)
            self.steps += 1
            if drafts:
                self.verified(fed, [one.token_id for one in sampled], len(self.request.output_ids) - before)
            quiet = 0 if drafts else quiet + 1
        if quiet:
            self.quiet(quiet)

    def quiet(self, count: int) -> None:
        """Tell of steps in which nothing was guessed."""
        why = "no n-gram of the last tokens has occurred before, or there is a pause"
        if self.steps == 1:
            say = f"The prompt is computed, and the first token chosen. k begins at {self.k}."
        else:
            say = f"{plural(count, 'step')} without a guess: {why}. A token each."
        self.show(say, gained=count, code=f"{SPECULATOR}.extend")

    def guess(self, drafts: Sequence[int]) -> None:
        said = "".join(self.words(drafts))
        tail = "".join(self.words(self.request.token_ids[-2:]))
        self.show(
            f"The text ends in … {tail}, which occurred before. What followed there is guessed: {said}. That is "
            f"{plural(len(drafts), 'draft')}, each with a slot for its K and V.",
            drafts=drafts,
            fed=[self.request.token_ids[-1], *drafts],
            code=LOOKUP,
        )

    @property
    def adaptive(self):
        """How much is guessed for the request."""
        drafting: Any = self.engine.scheduler.drafting
        return drafting.adaptive_of(self.request)

    @property
    def k(self) -> int:
        return self.adaptive.k

    def verified(self, fed: list[int], chosen: list[int], gained: int) -> None:
        """Tell what became of a guess, and ask beforehand where that is not plain."""
        right, count = gained - 1, len(fed) - 1
        if self.request.is_finished and right < count and chosen[right] == fed[1 + right]:
            why = f"{self.word(chosen[right])} ends the answer, so the drafts behind it are dropped, right or wrong."
        elif right == count:
            why = f"{'Both' if count == 2 else f'All {count}'} drafts are what the rows chose"
            why += ", and the last row's token comes on top."
        else:
            why = (
                f"Row {right} chose {self.word(chosen[right])}, not {self.word(fed[1 + right])}: its token stands, and "
            )
            why += "the KV of what was guessed there is truncated."
        others = sorted({1, count, count + 1, gained} - {gained})
        asked = count == 1 or (count, gained) in self.asked
        self.asked.add((count, gained))
        question = ask("The rows have been computed. How many tokens does this step yield?", gained, others, why)
        last = self.request.is_finished
        say = f"{plural(gained, 'token')} in one step. {why} " + (
            "The answer is complete." if last else f"k is now {self.k}."
        )
        self.show(say, None if asked else question, fed=fed, chosen=chosen, gained=gained, code=f"{SPECULATOR}.accept")


OPENING = {
    ACTS[0]: f"The pocket model continues a times table, greedily. At most {MAX_DRAFTS} tokens are guessed in a step; "
    f"a block has {BLOCK_SIZE} slots.",
    ACTS[1]: "A question is asked a second time. Its answer is in the prompt, and the model knows it by heart.",
}


def record(tape: Tape) -> None:
    """Answer both prompts."""
    for name in ACTS:
        act = Act(tape, name)
        act.show(OPENING[name], code=SPECULATOR)
        act.play()
