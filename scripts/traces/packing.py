"""Course machinery. Lesson 9's trace: a weight's words in memory, row by row and packed, read from real tensors."""

from typing import Any

from scripts.traces.tape import Tape, ask, ranges

import torch
from torch import Tensor

from mini_engine.layers.pack import TILE, PackedWeight

OUTPUTS, INPUTS = 32, 6
LINE_WORDS, WORD_BYTES, ITEM_BYTES = 16, 4, 2
SOUGHT = (20, 5)  # an output and an input
PACK = "mini_engine/layers/pack.py"


def numbered(num_outputs: int) -> Tensor:
    """Return a weight `[num_outputs, INPUTS]` in bfloat16 whose numbers are their positions: 1, 2, 3, …"""
    return torch.arange(1, num_outputs * INPUTS + 1).view(num_outputs, INPUTS).bfloat16()  # exact up to 256


def words_of(memory: Tensor) -> list[list[int] | None]:
    """Return memory as words: each one's output and index in its row, or None for padding."""
    firsts = [int(value) - 1 for value in memory.reshape(-1)[:: WORD_BYTES // ITEM_BYTES]]
    return [None if at < 0 else [at // INPUTS, at % INPUTS // 2] for at in firsts]


class Packing(Tape):
    """Packs a weight tile by tile, reads from it, and pads another."""

    def __init__(self) -> None:
        scene = {"line": LINE_WORDS, "word_bytes": WORD_BYTES, "inputs": INPUTS}
        title = "Packing: the same words in another order"
        super().__init__("l9-packing", "l9_speed/packing.trace.js", "packing", title, 4, **scene)
        self.memory = numbered(OUTPUTS)

    def state(self) -> dict[str, Any]:
        """Return the frame's state. marked: words by their place in memory."""
        words = words_of(self.memory)
        lines = [words[start : start + LINE_WORDS] for start in range(0, len(words), LINE_WORDS)]
        return {"lines": lines, "marked": []}

    def places(self, output: int | None, word: int | None) -> list[int]:
        """Return the places in memory of the words of an output, or with an index; None for any."""
        words = enumerate(words_of(self.memory))
        return [at for at, one in words if one and output in (None, one[0]) and word in (None, one[1])]

    def record(self) -> None:
        self.rows_in_order()
        self.packing()
        self.reading()
        self.seeking()
        self.padding()

    def rows_in_order(self) -> None:
        PackedWeight(numbered(OUTPUTS))  # the result that the first frames lead up to
        self.show(
            f"A weight of {OUTPUTS} outputs × {INPUTS} inputs, row by row. A box is a word: two bfloat16 of one "
            "output.",
            f"{PACK}::PackedWeight",
        )
        first = self.places(None, 0)[:TILE]
        lines = len({at // LINE_WORDS for at in first})
        text = "Inputs 0 and 1 meet the first word of every output. In how many lines are those of outputs 0 … "
        why = f"{TILE} rows of {INPUTS * ITEM_BYTES} bytes are {TILE * INPUTS * ITEM_BYTES} bytes."
        self.show(
            f"Inputs 0 and 1 meet each output's first word: {INPUTS * ITEM_BYTES} bytes apart, in {lines} lines, "
            f"{len(first)} small loads.",
            f"{PACK}::PackedWeight",
            ask(f"{text}{TILE - 1}?", lines, (1, 6, 16), why),
            marked=first,
        )

    def packing(self) -> None:
        """Pack one tile after the other, each as a separate weight, in place."""
        count = TILE * INPUTS // 2
        PackedWeight(self.memory[:TILE])
        self.show(
            f"The first {TILE} rows, packed: word 0 of all outputs, then 1, then 2, in the same {count * WORD_BYTES} "
            "bytes.",
            f"{PACK}::interleave",
            marked=list(range(count)),
        )
        PackedWeight(self.memory[TILE:])
        said = "The second tile, in its own place. There never was a second copy of the weight."
        self.show(said, f"{PACK}::interleave", marked=list(range(count, 2 * count)))

    def reading(self) -> None:
        self.show(
            f"Now one load of {LINE_WORDS * WORD_BYTES} bytes brings the words of {TILE} outputs for the same two "
            "inputs.",
            f"{PACK}::PackedWeight",
            marked=self.places(None, 0)[:TILE],
        )
        second = sorted(at for output in range(TILE, OUTPUTS) for at in self.places(output, None))
        low, high = second[0] * WORD_BYTES, (second[-1] + 1) * WORD_BYTES - 1
        text = f"One thread computes outputs {TILE} … {OUTPUTS - 1}. Which bytes does it read?"
        why = "A tile is contiguous, so memory is read in order, which is how it is fastest."
        self.show(
            f"A thread that computes outputs {TILE} … {OUTPUTS - 1} reads bytes {low} … {high} from end to end.",
            f"{PACK}::PackedWeight",
            ask(text, f"{low} … {high}", ("every other line", "0 … 383"), why),
            marked=second,
        )

    def seeking(self) -> None:
        output, entry = SOUGHT
        at = self.memory.reshape(-1).tolist().index(1 + output * INPUTS + entry) * ITEM_BYTES
        before = (output * INPUTS + entry) * ITEM_BYTES
        text = f"Row by row, the weight of output {output} and input {entry} was at byte {before}. Where is it now?"
        wrong = (f"byte {before}", f"byte {at - ITEM_BYTES}", "byte 200")
        self.show(
            f"Output {output}, input {entry}: byte {before} before, byte {at} now, behind one whole tile and two "
            "lines.",
            f"{PACK}::PackedWeight",
            ask(text, f"byte {at}", wrong, f"192 + 2 · 64 + 4 · 4 + 2 = {at}."),
            marked=[at // WORD_BYTES],
        )
        words = self.places(output, None)
        row = PackedWeight(numbered(OUTPUTS)).rows(torch.tensor([output]))[0].int().tolist()
        self.show(
            f"As an embedding, a row is read back: {len(words)} words of tile {output // TILE}, {TILE} words apart, "
            f"give {ranges(row)}.",
            f"{PACK}::PackedWeight.rows",
            marked=words,
        )

    def padding(self) -> None:
        self.memory = PackedWeight(numbered(OUTPUTS + 1)).tiles
        text = f"A weight has {OUTPUTS + 1} outputs. How many lines does it take?"
        why = f"Three tiles of {INPUTS // 2} lines each. Zeros add nothing to a sum."
        self.show(
            f"{OUTPUTS + 1} outputs need a third tile: one row, {TILE - 1} rows of zeros. Only then is new memory "
            "needed.",
            f"{PACK}::PackedWeight",
            ask(text, len(self.state()["lines"]), (6, 7, 8), why),
            marked=self.places(OUTPUTS, None),
        )
