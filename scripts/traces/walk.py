"""Course machinery. Lesson 3's second trace: online softmax over a query's blocks, as the kernel itself computes it."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from scripts.traces.tape import Tape, ask, listed, plural

BLOCK_SIZE, NUM_BLOCKS = 4, 8
PROMPT, GONE = "Once upon a time there was a cat. The cat was very old", ("Hello", "The capital of France is")
LAYER, HEAD = 0, 1  # the attention to show
SHOWN = 3  # of a value's numbers
KERNEL = "mini_engine/attention/blockwise.py::attend_blocks"
AT_ONCE = "mini_engine/attention/dense.py::causal_attention"
CLOSE = 1e-4  # between the result and the reference kernel's, which adds in another order


def tape() -> Tape:
    scene = {"block_size": BLOCK_SIZE, "name": "A"}
    return Tape("l3-walk", "l3_block_tensor/walk.trace.js", "walk", "Softmax, block by block", scene, 11)


class Kept(NamedTuple):
    """What the kernel has for one query and head after a block: the block's scores, and what it keeps."""

    scores: list[float]
    best: float  # the largest score so far
    total: float  # the sum of exp(score − best)
    sums: list[float]  # the sum of exp(score − best) · V


def kept_by_kernel(
    q: Any, k_cache: Any, v_cache: Any, blocks: Sequence[int], kv_len: int, scale: float, query: int, head: int
) -> list[Kept]:
    """Run the block-by-block kernel on one sequence; return what it kept of this query and head after each block.

    Raises:
        ValueError: the kernel did not show every block.
    """
    from mini_engine.attention.blockwise import attend_blocks

    seen: list[Kept] = []
    group = q.shape[1] // k_cache.shape[2]

    def watch(*kept: Any) -> None:
        scores, best, total, sums = (x[query, head // group, head % group].tolist() for x in kept)
        seen.append(Kept(scores, best[0], total[0], sums))

    attend_blocks(q, k_cache, v_cache, blocks, kv_len, scale, watch)
    if len(seen) != (wanted := -(-kv_len // k_cache.shape[1])):
        raise ValueError(f"attend_blocks called `watch` {len(seen)} times for {wanted} blocks; call it after each one")
    return seen


class Walk:
    """The last query's walk over its blocks: what the kernel has read so far, and the three things that it keeps.

    call, out: the arguments of one layer's call of a kernel, and the reference kernel's result.
    best: the largest score so far. total: the sum of exp(score − best). sums: the sum of exp(score − best) · V.
    """

    def __init__(self, tape: Tape, words: list[str], table: list[int], call: tuple, out: Any) -> None:
        q, k_cache, v_cache, _, _, _, scale = call
        self.tape, self.words, self.table = tape, words, table
        self.kept = kept_by_kernel(q, k_cache, v_cache, table, len(words), scale, len(words) - 1, HEAD)
        self.reference = out[-1, HEAD, :SHOWN].tolist()
        self.best, self.total, self.sums = -math.inf, 0.0, [0.0] * SHOWN
        self.entry: int | None = None
        self.num_read = self.num_added = 0

    def show(self, say: str, question=None, factor: float | None = None, out=None, kernel=None, code=KERNEL) -> None:
        scores = [score for kept in self.kept for score in kept.scores][: self.num_read]
        keys = [{"word": word, "score": None, "part": None} for word in self.words]
        for i, score in enumerate(scores):
            keys[i]["score"] = round(score, 2)
            keys[i]["part"] = round(math.exp(score - self.best), 3) if i < self.num_added else None
        kept = {"best": None if math.isinf(self.best) else round(self.best, 2), "sum": round(self.total, 2)}
        kept |= {"sums": rounded(self.sums), "factor": factor, "out": out, "kernel": kernel}
        self.tape.frame(say, question, code=code, table=self.table, entry=self.entry, keys=keys, **kept)

    def block(self, entry: int) -> None:
        """Show a block: its scores, the rescaling if one of them is the largest so far, and its part of the sums."""
        self.entry, kept = entry, self.kept[entry]
        count = len(kept.scores)
        self.num_read += count
        said, question = self.about_scores(entry, count, max(kept.scores))
        if entry == 0:
            self.best = kept.best
        self.show(said, question)
        if kept.best > self.best:
            self.rescale(kept.best)
        self.total, self.sums = kept.total, kept.sums[:SHOWN]
        self.num_added += count
        added = " + ".join(f"{math.exp(score - kept.best):.2f}" for score in kept.scores)
        self.show(f"Its parts, {added}, go into the sum, and each part times its value into the sum of values.")

    def about_scores(self, entry: int, count: int, largest: float):
        """Return what a block's scores say, and a question about them or None."""
        said = f"Block {self.table[entry]}: {plural(count, 'key')}, read in place, with scores up to {largest:.2f}. "
        if entry == 0:
            return said + f"The first maximum is {largest:.2f}.", None
        if largest > self.best:
            said += f"That is more than {self.best:.2f}, so what has been summed is too large now."
        else:
            said += f"The maximum remains {self.best:.2f}, so nothing is rescaled."
        if count < BLOCK_SIZE:
            why = f"{len(self.words)} tokens are written. The kernel knows the length, and stops behind the last one."
            text = f"The last block is {self.table[entry]}. How many of its {BLOCK_SIZE} keys are read?"
            return said, ask(text, count, (BLOCK_SIZE, 1, 0), why)
        if largest <= self.best:
            why = "All parts are relative to the same maximum, so they can be added as they are."
            text = (
                f"The next scores go up to {largest:.2f}, with {self.best:.2f} the maximum. What changes in the sums?"
            )
            wrong = (f"they are multiplied by {math.exp(largest - self.best):.2f}", "they begin again")
            return said, ask(text, "nothing yet", wrong, why)
        return said, None

    def rescale(self, largest: float) -> None:
        """Multiply the sums so that they are relative to a new maximum."""
        old, self.best = self.best, largest
        factor = math.exp(old - largest)
        self.total *= factor
        self.sums = [factor * value for value in self.sums]
        why = f"Each part was exp(score − {old:.2f}) and should be exp(score − {largest:.2f})."
        self.show(
            f"All sums are multiplied by exp({old:.2f} − {largest:.2f}) = {factor:.2f}. The bars shrink, and no key is "
            "read again.",
            ask(
                f"The maximum rises from {old:.2f} to {largest:.2f}. By what are the sums so far multiplied?",
                f"{factor:.2f}",
                (f"{1 / factor:.2f}", "1.00", "0.00"),
                why,
            ),
            factor=round(factor, 2),
        )

    def end(self) -> None:
        """Divide, and compare with the reference kernel, which takes the softmax over all scores at once."""
        out = [value / self.total for value in self.sums]
        self.entry = None
        said = f"After the last block the sum of values is divided by the sum, {self.total:.2f}: attention's output."
        self.show(said, out=rounded(out))
        same = all(math.isclose(*pair, abs_tol=CLOSE) for pair in zip(out, self.reference, strict=True))
        verdict = "the same" if same else "something else"
        why = "Rescaling made every part what it would have been with the last maximum from the start."
        self.show(
            f"The reference kernel copies the keys together and takes the softmax over all {len(self.words)} scores at "
            f"once. It gives {verdict}: {listed([signed(value) for value in rounded(self.reference)])}.",
            ask("And softmax over all scores at once, as the reference kernel does it?", verdict, WRONG, why),
            out=rounded(out),
            kernel=rounded(self.reference),
            code=AT_ONCE,
        )


WRONG = ("smaller numbers, because no part was rescaled", "larger numbers")


def signed(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


def rounded(values) -> list[float]:
    return [round(value, 3) + 0.0 for value in values]


def record(tape: Tape) -> None:
    """Walk over the blocks of the last query."""
    walk = Walk(tape, *run())
    walk.show(
        f"The query of “{walk.words[-1]}”, the last of {len(walk.words)} tokens, in one head of the pocket model. "
        "Softmax needs the largest score before it can add anything up, and the keys come block by block."
    )
    for entry in range(len(walk.table)):
        walk.block(entry)
    walk.end()


def run() -> tuple[list[str], list[int], tuple, Any]:
    """Run the model once, with K and V in blocks that are not in order.

    Returns:
        the prompt's tokens as words, its blocks, and the arguments and the result of one layer's call of the reference
        kernel.
    """
    import torch

    from mini_engine.attention.reference import paged_attention
    from mini_engine.checkpoint.weights import load_model
    from mini_engine.kv.allocator import BlockAllocator
    from mini_engine.kv.block_table import BlockTable
    from mini_engine.kv.block_tensor import KvPool, PackedRequest, plan_packed, reserve_all
    from mini_engine.pocket import POCKET_DIR
    from mini_engine.text.tokenizer import Tokenizer

    tokenizer, model = Tokenizer(POCKET_DIR), load_model(POCKET_DIR)
    calls: list[tuple] = []

    def watched(*arguments):
        calls.append((arguments, paged_attention(*arguments)))
        return calls[-1][1]

    pool, allocator = KvPool(model.config, NUM_BLOCKS, BLOCK_SIZE, watched), BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)
    *gone, request = [PackedRequest(tokenizer.encode(prompt), BlockTable(allocator)) for prompt in (*GONE, PROMPT)]
    reserve_all(gone)
    for one in gone:
        one.table.free()
    reserve_all([request])
    ids = torch.tensor(request.token_ids)
    with torch.inference_mode():
        model(ids, pool, plan_packed([request], BLOCK_SIZE, pool.device), rows=torch.tensor([len(ids) - 1]))
    words = [tokenizer.decode([token]).strip() for token in request.token_ids]
    return words, list(request.table.blocks), *calls[LAYER]
