"""Lesson 14. Known answers, and a runner that makes any model give them.

Random weights have a real model's speed, but their answers are not worth guessing. So the answers are given: the runner
computes every row as usual and then raises the logit of the known answer's token. Guesses come from the text alone, so
acceptance is as realistic as the texts; the time of a step is the model's own.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mini_engine.engine.runner import Runner
from mini_engine.engine.scheduler import Chunk
from mini_engine.text.tokenizer import Tokenizer

CERTAIN = 1e9  # a logit above any that a model computes
DOCUMENT = (
    "The harbour of Northbridge froze in the winter of 1891, and for nine weeks no ship came in. Anna Weber, who kept "
    "the light on the southern pier, wrote down every day how thick the ice was, what the wind did, and which of the "
    "fishing families had run out of flour. Her notes fill two small books. The council used them the next summer, "
    "when it decided to build a second pier and to keep a store of grain behind the church. Anna Weber was asked to "
    "manage the store, and she did so for twenty years. When she died, the town found that she had gone on writing: "
    "the last entry, from the evening before, says that the wind had turned and that the light was burning well."
)
STORY = (
    "Nobody in the valley could say when the bell had last been rung. It hung in a tower without stairs, and swallows "
    "went in and out of the four small windows under the roof. One morning in April it rang all by itself, eleven "
    "times, and every dog between the mill and the bridge lay down in the road. Old Peter laughed until he had to "
    "hold on to the fence. His granddaughter climbed the pear tree to see better, and what she saw from there she "
    "told only to the cat, many years later, on a rainy Sunday when both of them had nothing else to do."
)


class Load(NamedTuple):
    """A prompt, and the answer that a good model would give."""

    prompt: str
    answer: str


def sentences(text: str) -> list[str]:
    return [f"{sentence.rstrip('.')}." for sentence in text.split(". ")]


def as_list(number: int) -> str:
    return f'{{"id": {number}, "name": "part {number}", "price": {number * 7 % 50}, "in_stock": true}},\n'


def loads() -> dict[str, Load]:
    """Return the loads by name: four that repeat something, and prose, which does not."""
    first, _, third, *_, last = sentences(DOCUMENT)
    table = [f"{number} times 7 is {number * 7}. " for number in range(1, 31)]
    return {
        "edit this text": Load(
            f"{DOCUMENT}\n\nRewrite the text. The woman's name was Clara Weber.\n\n",
            DOCUMENT.replace("Anna", "Clara"),
        ),
        "answer from a document": Load(
            f"{DOCUMENT}\n\nWhat happened, and what remains? Quote the text.\n\n",
            f'At first, "{first}" Of what remains, the text says: "{third}" It ends like this: "{last}"',
        ),
        "counting": Load("".join(table[:4]), "".join(table[4:])),
        "a list of records": Load(
            "Write the parts as JSON.\n[" + as_list(1), "".join(as_list(number) for number in range(2, 16))
        ),
        "prose": Load(f"{DOCUMENT}\n\nTell me a story about a bell.\n\n", STORY),
    }


class Script(NamedTuple):
    """A load in tokens."""

    prompt_ids: list[int]
    answer_ids: list[int]

    @classmethod
    def of(cls, load: Load, tokenizer: Tokenizer) -> "Script":
        """Tokenize prompt and answer, each on its own."""
        return cls(tokenizer.encode(load.prompt), tokenizer.encode(load.answer))


class ReplayRunner:
    """An engine's runner, `inner`, whose requests give known answers. `scripts` has them by request id."""

    fault = ""

    def __init__(self, inner: Runner, scripts: Mapping[str, Script]) -> None:
        self.inner, self.scripts, self.close = inner, scripts, inner.close
        self.model, self.pool = inner.model, inner.pool

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Run the model; then make the known answer's token the best one in each row."""
        logits = self.inner.run(chunks)
        tokens = list(itertools.chain.from_iterable(map(self.tokens_of, chunks)))
        logits[range(len(tokens)), tokens] = CERTAIN
        return logits

    def tokens_of(self, chunk: Chunk) -> list[int]:
        """Return the token that each row of a chunk should choose; any token after the end of the answer."""
        script = self.scripts[chunk.request.id]
        behind = range(
            chunk.stop - chunk.num_logits - len(script.prompt_ids) + 1, chunk.stop - len(script.prompt_ids) + 1
        )
        return [script.answer_ids[min(index, len(script.answer_ids) - 1)] for index in behind]
