"""Course machinery. Lesson 9's trace: a weight's words in memory, row by row and packed, read from real tensors."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from scripts.traces.tape import Tape, ask, ranges

if TYPE_CHECKING:
    from torch import Tensor

OUTPUTS, INPUTS = 32, 6
LINE_WORDS, WORD_BYTES, ITEM_BYTES = 16, 4, 2
SOUGHT = (20, 5)  # an output and an input
PACK = "mini_engine/layers/pack.py"


def tape() -> Tape:
    scene = {"line": LINE_WORDS, "word_bytes": WORD_BYTES, "inputs": INPUTS}
    return Tape(
        "l9-packing", "l9_speed/packing.trace.js", "packing", "Packing: the same words in another order", scene, 4
    )


def numbered(num_outputs: int) -> "Tensor":
    """Return a weight `[num_outputs, INPUTS]` in bfloat16 whose numbers say where they belong: 1, 2, 3, …"""
    import torch

    return torch.arange(1, num_outputs * INPUTS + 1).view(num_outputs, INPUTS).bfloat16()  # exact up to 256


def lines_of(memory: "Tensor") -> list[list[list[int] | None]]:
    """Return memory as lines of words: each word's output and index in its row, or None for padding."""
    firsts = [int(value) - 1 for value in memory.reshape(-1)[:: WORD_BYTES // ITEM_BYTES]]
    words = [None if at < 0 else [at // INPUTS, at % INPUTS // 2] for at in firsts]
    return [words[start : start + LINE_WORDS] for start in range(0, len(words), LINE_WORDS)]


class Story:
    """Packs a weight tile by tile, with lesson 9's own functions."""

    def __init__(self, tape: Tape) -> None:
        from mini_engine.layers.pack import TILE, PackedWeight

        self.tape, self.tile = tape, TILE
        self.packed = PackedWeight(numbered(OUTPUTS))
        self.memory = numbered(OUTPUTS)

    def show(
        self, say: str, code: str, question=None, marked: Sequence[int] = (), memory: "Tensor | None" = None
    ) -> None:
        """Add a frame. marked: words by their place in memory."""
        lines = lines_of(self.memory if memory is None else memory)
        self.tape.frame(say, question, f"{PACK}::{code}", lines=lines, marked=list(marked))

    def places(self, output: int | None, word: int | None, memory: "Tensor | None" = None) -> list[int]:
        """Return where in memory the words of an output, or with an index, lie; None for any."""
        words = [word for line in lines_of(self.memory if memory is None else memory) for word in line]
        return [at for at, one in enumerate(words) if one and output in (None, one[0]) and word in (None, one[1])]

    def interleave(self, tile: int) -> None:
        """Pack one tile in place, as `PackedWeight` does with all of them."""
        from mini_engine.layers.pack import interleave

        rows = self.memory[tile * self.tile : (tile + 1) * self.tile]
        per_word = WORD_BYTES // ITEM_BYTES
        shape = (1, self.tile, INPUTS // per_word, per_word)
        interleave(rows.view(shape), rows.view(shape[0], shape[2], shape[1], per_word))


def record(tape: Tape) -> None:
    """Pack a weight, read from it, and pad another."""
    story = Story(tape)
    rows_in_order(story)
    packing(story)
    reading(story)
    padding(story)


def rows_in_order(story: Story) -> None:
    story.show(
        f"A weight with {OUTPUTS} outputs and {INPUTS} inputs, row by row. A box is a word: two bfloat16 of one "
        f"output, whose number it has. A line of memory has {LINE_WORDS * WORD_BYTES} bytes.",
        "PackedWeight",
    )
    first = [at for at in story.places(None, 0) if at < story.tile * INPUTS // 2]
    lines = {at // LINE_WORDS for at in first}
    story.show(
        f"A decode step multiplies inputs 0 and 1 by the first word of each output. Those of outputs 0 … "
        f"{story.tile - 1} are {INPUTS * ITEM_BYTES} bytes apart, in {len(lines)} lines: {len(first)} small loads.",
        "PackedWeight",
        ask(
            f"Inputs 0 and 1 meet the first word of every output. In how many lines are those of outputs 0 … "
            f"{story.tile - 1}?",
            len(lines),
            (1, 6, 16),
            f"{story.tile} rows of {INPUTS * ITEM_BYTES} bytes are {story.tile * INPUTS * ITEM_BYTES} bytes.",
        ),
        marked=first,
    )


def packing(story: Story) -> None:
    story.interleave(0)
    count = story.tile * INPUTS // 2
    story.show(
        f"The first {story.tile} rows are packed: word 0 of all {story.tile} outputs, then word 1, then word 2. The "
        f"tile takes the bytes that its rows took, {count * WORD_BYTES}.",
        "interleave",
        marked=range(count),
    )
    story.interleave(1)
    story.show(
        "The second tile, in its own place. There never was a second copy of the weight.",
        "interleave",
        marked=range(count, 2 * count),
    )


def reading(story: Story) -> None:
    first = story.places(None, 0)[: story.tile]
    story.show(
        f"Now one load of {LINE_WORDS * WORD_BYTES} bytes brings the words of {story.tile} outputs that meet the same "
        "two inputs.",
        "PackedWeight",
        marked=first,
    )
    second = [at for output in range(story.tile, OUTPUTS) for at in story.places(output, None)]
    low, high = min(second) * WORD_BYTES, (max(second) + 1) * WORD_BYTES - 1
    story.show(
        f"A thread that computes outputs {story.tile} … {OUTPUTS - 1} reads bytes {low} … {high} from end to end.",
        "PackedWeight",
        ask(
            f"One thread computes outputs {story.tile} … {OUTPUTS - 1}. Which bytes does it read?",
            f"{low} … {high}",
            ("every other line", "0 … 383"),
            "A tile is contiguous, so memory is read in order, which is how it is fastest.",
        ),
        marked=sorted(second),
    )
    seeking(story)


def seeking(story: Story) -> None:
    output, entry = SOUGHT
    at = story.memory.reshape(-1).tolist().index(1 + output * INPUTS + entry) * ITEM_BYTES
    before = (output * INPUTS + entry) * ITEM_BYTES
    story.show(
        f"Output {output}, input {entry}: byte {before} before, byte {at} now. One whole tile, two lines, four words "
        "and half a word lie in front of it.",
        "PackedWeight",
        ask(
            f"Row by row, the weight of output {output} and input {entry} was at byte {before}. Where is it now?",
            f"byte {at}",
            (f"byte {before}", f"byte {at - ITEM_BYTES}", "byte 200"),
            f"192 + 2 · 64 + 4 · 4 + 2 = {at}.",
        ),
        marked=[at // WORD_BYTES],
    )
    row = read_back(story, output)
    story.show(
        f"As an embedding, a row is read back: {len(story.places(output, None))} words of tile {output // story.tile}, "
        f"{story.tile} words apart, put together to {ranges(row)}: the numbers that this test weight began with.",
        "PackedWeight.rows",
        marked=story.places(output, None),
    )


def read_back(story: Story, output: int) -> list[int]:
    """Return the packed weight's row, as `PackedWeight.rows` gives it."""
    import torch

    return story.packed.rows(torch.tensor([output]))[0].int().tolist()


def padding(story: Story) -> None:
    from mini_engine.layers.pack import PackedWeight

    memory = PackedWeight(numbered(OUTPUTS + 1)).tiles
    last = story.places(OUTPUTS, None, memory)
    story.show(
        f"With {OUTPUTS + 1} outputs there is a third tile: one row, and {story.tile - 1} rows of zeros. Only such a "
        "weight needs new memory.",
        "PackedWeight",
        ask(
            f"A weight has {OUTPUTS + 1} outputs. How many lines does it take?",
            len(lines_of(memory)),
            (6, 7, 8),
            f"Three tiles of {INPUTS // 2} lines each. Zeros add nothing to a sum.",
        ),
        marked=last,
        memory=memory,
    )
