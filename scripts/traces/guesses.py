"""Course machinery. Lesson 14's trace: drafts appear after a text, the right ones stay, the KV of the others goes."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from scripts.l14_smoke import asked_twice
from scripts.traces.tape import Tape, ask, plural

from mini_engine.assembly.build import build_engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.speculation.options import Speculation
from mini_engine.speculation.speculator import drafts_of

BLOCK_SIZE, NUM_BLOCKS, MAX_DRAFTS = 4, 48, 8
SHOWN, BLOCKS_SHOWN = 27, 12  # the last tokens of the text, and its last blocks
TABLE, TWICE = "a times table", "a question asked twice"
ACTS = {  # a prompt, the most tokens of its answer, and the first caption
    TABLE: (
        "1 times 5 is 5. 2 times 5 is 10.",
        17,
        f"The pocket model continues a times table. At most {MAX_DRAFTS} tokens are guessed in a step.",
    ),
    TWICE: (
        asked_twice("What is a KV cache?"),
        48,
        "A question is asked a second time: its answer is in the prompt.",
    ),
}
SPECULATOR = "mini_engine/speculation/speculator.py::Speculator"
LOOKUP = "mini_engine/speculation/lookup.py::LookupDrafter.propose"


class Guesses(Tape):
    """Prompts, answered by the pocket model with speculation, step by step."""

    def __init__(self) -> None:
        scene = {"block_size": BLOCK_SIZE, "rows": 1 + MAX_DRAFTS, "acts": list(ACTS)}
        title = "Guess, verify, truncate"
        super().__init__("l14-guesses", "l14_speculation/guesses.trace.js", "guesses", title, 8, **scene)

    def record(self) -> None:
        """Answer both prompts."""
        for act, (prompt, length, opening) in ACTS.items():
            self.act, self.steps, self.asked = act, 0, set[tuple[int, int]]()
            self.engine = build_engine(
                self.model, backend="reference", num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE,
                enable_prefix_caching=False, speculate=Speculation(MAX_DRAFTS),
            )  # fmt: skip
            params = SamplingParams(temperature=0, max_tokens=length)
            self.request = self.engine.add_request(act, self.tokenizer.encode(prompt), params)
            self.tell(opening, SPECULATOR)
            self.play()

    @cached_property
    def marks(self) -> dict[int, str]:
        """The names of the chat template's marks."""
        return {self.tokenizer.encode(mark)[0]: mark for mark in self.tokenizer.special_texts}

    def words(self, token_ids: Sequence[int]) -> list[str]:
        """Return tokens as they are shown: a space as ␣, a line's end as ↵, a mark of the chat template by its name."""
        texts = [self.marks.get(token_id) or self.tokenizer.decode([token_id]) for token_id in token_ids]
        return [text.replace(" ", "␣").replace("\n", "↵") for text in texts]

    @property
    def adaptive(self):
        """The request's Adaptive."""
        decoding: Any = self.engine.decoding
        return decoding.adaptive_of(self.request)

    def blocks(self) -> list[list[int]]:
        """Return, for each block, the number of slots with accepted tokens, and of slots in use."""
        table = self.engine.scheduler.manager.tables.get(self.act)
        num_slots = table.num_tokens if table else 0
        kept = min(num_slots, len(self.request.token_ids))
        sizes = [(first, min(BLOCK_SIZE, num_slots - first)) for first in range(0, num_slots, BLOCK_SIZE)]
        return [[max(0, min(size, kept - first)), size] for first, size in sizes]

    def tell(
        self, say: str, code: str, question=None, drafts: Sequence[int] = (), fed=(), chosen=(), gained: int = 0
    ) -> None:
        """Add a frame. fed, chosen: the rows of the step. gained: the number of newest tokens that it brought."""
        request, blocks = self.request, self.blocks()
        old = request.output_ids[: len(request.output_ids) - gained]
        text = {"prompt": request.prompt_ids, "old": old, "new": request.output_ids[len(old) :], "guess": drafts}
        words = [[word, kind] for kind, ids in text.items() for word in self.words(ids)]
        self.show(
            say,
            code,
            question,
            act=self.act,
            hidden=len(words) - len(words[-SHOWN:]),
            text=words[-SHOWN:],
            num_blocks=len(blocks),
            blocks=blocks[-BLOCKS_SHOWN:],
            fed=self.words(fed),
            chosen=self.words(chosen),
            stand=gained if fed else 0,
            k=self.adaptive.k,
            pause=self.adaptive.pause,
            steps=self.steps,
            tokens=len(request.output_ids),
        )

    def play(self) -> None:
        """Run the engine until the answer is complete."""
        quiet, scheduler, request = 0, self.engine.scheduler, self.request  # quiet: tokens without a guess or a frame
        while not request.is_finished:
            chunks = self.engine.decoding.plan(scheduler)
            drafts = drafts_of(chunks[0])
            if drafts:
                self.quiet(quiet)
                self.guess(drafts)
            sampled, fed = self.engine._run(chunks), chunks[0].token_ids
            before = len(request.output_ids)
            self.engine.decoding.record(scheduler, chunks, sampled)
            self.steps += 1
            if drafts:
                self.verified(fed, [one.token_id for one in sampled], len(request.output_ids) - before)
            quiet = 0 if drafts else quiet + 1
        self.quiet(quiet)

    def quiet(self, count: int) -> None:
        """Describe steps without guesses, if there were any."""
        if not count:
            return
        why = "no n-gram has occurred before, or there is a pause"
        say = f"{plural(count, 'step')} without a guess: {why}. A token each."
        if self.steps == 1:
            say = f"The prompt is computed, and the first token chosen. k begins at {self.adaptive.k}."
        self.tell(say, f"{SPECULATOR}.plan", gained=count)

    def guess(self, drafts: Sequence[int]) -> None:
        tail, said = ("".join(self.words(ids)) for ids in (self.request.token_ids[-2:], drafts))
        self.tell(
            f"… {tail} occurred before. What followed is guessed: {said}.",
            LOOKUP,
            drafts=drafts,
            fed=[self.request.token_ids[-1], *drafts],
        )

    def verified(self, fed: list[int], chosen: list[int], gained: int) -> None:
        """Describe the fate of a guess, with a question beforehand if it is not obvious."""
        right, count, is_last = gained - 1, len(fed) - 1, self.request.is_finished
        guessed, chose = self.words(fed[1:]), self.words(chosen)
        if is_last and right < count and chosen[right] == fed[1 + right]:
            why = f"{chose[right]} ends the answer; drafts behind it are dropped."
        elif right == count:
            why = f"{'Both' if count == 2 else f'All {count}'} drafts are right, and the last row adds a token."
        else:
            why = f"Row {right} chose {chose[right]}, not {guessed[right]}, and stands; KV behind it goes."
        question = None
        if count > 1 and (count, gained) not in self.asked:
            others = (1, count, count + 1)
            question = ask("The rows have been computed. How many tokens does this step yield?", gained, others, why)
        self.asked.add((count, gained))
        say = f"{plural(gained, 'token')} in one step. {why} "
        say += "It is complete." if is_last else f"k is now {self.adaptive.k}."
        self.tell(say, f"{SPECULATOR}.accept", question, fed=fed, chosen=chosen, gained=gained)
