"""Course machinery. Lesson 3's second trace: online softmax over a query's blocks, as the kernel itself computes it."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from scripts.traces.tape import Tape, ask, listed, plural

import torch

from mini_engine.attention import blockwise
from mini_engine.attention.reference import paged_attention
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.block_table import BlockTable
from mini_engine.kv.block_tensor import KvPool, PackedRequest, plan_packed, reserve_all

BLOCK_SIZE, NUM_BLOCKS = 4, 8
PROMPT, GONE = "Once upon a time there was a cat. The cat was very old", ("Hello", "The capital of France is")
LAYER, HEAD = 0, 1  # the attention to show
SHOWN = 3  # of a value's numbers
KERNEL = "mini_engine/attention/blockwise.py::attend_blocks"
AT_ONCE = "mini_engine/attention/dense.py::causal_attention"
CLOSE = 1e-4  # between the result and the reference kernel's, which adds in another order
WRONG = ("smaller numbers, because no part was rescaled", "larger numbers")


class Kept(NamedTuple):
    """The kernel's state for one query and head after a block: the block's scores, and the running results."""

    scores: list[float]
    best: float  # the largest score so far
    total: float  # the sum of exp(score − best)
    sums: list[float]  # the sum of exp(score − best) · V


def kept_by_kernel(
    q: Any, k_cache: Any, v_cache: Any, blocks: Sequence[int], kv_len: int, scale: float, query: int, head: int
) -> tuple[list[Kept], list[float]]:
    """Run the block-by-block kernel on one sequence.

    Returns:
        its state for this query and head after each block, and its result for them.

    Raises:
        ValueError: the kernel did not show every block.
    """
    seen: list[Kept] = []
    group = q.shape[1] // k_cache.shape[2]

    def watch(*kept: Any) -> None:
        scores, best, total, sums = (x[query, head // group, head % group].tolist() for x in kept)
        seen.append(Kept(scores, best[0], total[0], sums))

    out = blockwise.attend_blocks(q, k_cache, v_cache, blocks, kv_len, scale, watch)
    if len(seen) != (wanted := -(-kv_len // k_cache.shape[1])):
        raise ValueError(f"attend_blocks called `watch` {len(seen)} times for {wanted} blocks; call it after each one")
    return seen, out[query, head].tolist()


class Watched:
    """A kernel that keeps the arguments and the result of its calls."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.calls = kernel, []

    def __call__(self, *arguments: Any) -> Any:
        self.calls.append((arguments, self.kernel(*arguments)))
        return self.calls[-1][1]


class Walk(Tape):
    """The last query's walk over its blocks: the blocks read so far, and the three running results.

    best: the largest score so far. total: the sum of exp(score − best). sums: the sum of exp(score − best) · V.
    """

    def __init__(self) -> None:
        file, title = "l3_block_tensor/walk.trace.js", "Softmax, block by block"
        super().__init__("l3-walk", file, "walk", title, 11, block_size=BLOCK_SIZE, name="A")
        self.best, self.total, self.sums = -math.inf, 0.0, [0.0] * SHOWN
        self.entry: int | None = None
        self.num_read = self.num_added = 0

    def run(self) -> None:
        """Run the model once, with K and V in shuffled blocks, and keep one layer's kernel call."""
        kernel = Watched(paged_attention)
        pool, allocator = KvPool(self.model.config, NUM_BLOCKS, BLOCK_SIZE, kernel), BlockAllocator(NUM_BLOCKS, 4)
        prompts = [self.tokenizer.encode(prompt) for prompt in (*GONE, PROMPT)]
        *gone, request = [PackedRequest(ids, BlockTable(allocator)) for ids in prompts]
        reserve_all(gone)
        for one in gone:
            one.table.free()
        reserve_all([request])
        ids = torch.tensor(request.token_ids)
        with torch.inference_mode():
            plan = plan_packed([request], BLOCK_SIZE, pool.device)
            self.model(ids, pool, plan, rows=torch.tensor([len(ids) - 1]))
        (q, k_cache, v_cache, *_, scale), out = kernel.calls[LAYER]
        self.prompt, self.table = self.words(request.token_ids), list(request.table.blocks)
        self.kept, self.out = kept_by_kernel(q, k_cache, v_cache, self.table, len(ids), scale, len(ids) - 1, HEAD)
        self.reference = out[-1, HEAD, :SHOWN].tolist()

    def state(self) -> dict[str, Any]:
        scores = [score for kept in self.kept for score in kept.scores][: self.num_read]
        keys = [{"word": word, "score": None, "part": None} for word in self.prompt]
        for i, score in enumerate(scores):
            part = round(math.exp(score - self.best), 3) if i < self.num_added else None
            keys[i] |= {"score": round(score, 2), "part": part}
        kept = {"best": None if math.isinf(self.best) else round(self.best, 2), "sum": round(self.total, 2)}
        kept |= {"sums": rounded(self.sums), "factor": None, "out": None, "kernel": None}
        return {"table": self.table, "entry": self.entry, "keys": keys, **kept}

    def record(self) -> None:
        """Walk over the blocks of the last query."""
        self.run()
        self.show(
            f"The query of “{self.prompt[-1]}”, the last of {len(self.prompt)} tokens, in one head; its keys come "
            "block by block.",
            KERNEL,
        )
        for entry, kept in enumerate(self.kept):
            self.block(entry, kept)
        self.end()

    def block(self, entry: int, kept: Kept) -> None:
        """Show a block: its scores, the rescaling if one of them is the largest so far, and its contribution."""
        self.entry = entry
        self.num_read += len(kept.scores)
        said, question = self.about_scores(len(kept.scores), max(kept.scores))
        if entry == 0:
            self.best = kept.best
        self.show(said, KERNEL, question)
        if kept.best > self.best:
            self.rescale(kept.best)
        self.total, self.sums = kept.total, kept.sums[:SHOWN]
        self.num_added += len(kept.scores)
        added = " + ".join(f"{math.exp(score - kept.best):.2f}" for score in kept.scores)
        self.show(f"Its parts, {added}, go into the sum; part × value into the sum of values.", KERNEL)

    def about_scores(self, count: int, largest: float):
        """Describe a block's scores; return that and a question about them or None."""
        block = self.table[self.entry or 0]
        said = f"Block {block}: {plural(count, 'key')}, read in place, with scores up to {largest:.2f}"
        if self.entry == 0:
            return said + ", the first maximum.", None
        if largest > self.best:
            said += f", above {self.best:.2f}: the sums are too large now."
        else:
            said += f". The maximum remains {self.best:.2f}."
        if count < BLOCK_SIZE:
            why = f"{len(self.prompt)} tokens are written. The kernel knows the length, and stops behind the last one."
            text = f"The last block is {block}. How many of its {BLOCK_SIZE} keys are read?"
            return said, ask(text, count, (BLOCK_SIZE, 1, 0), why)
        if largest > self.best:
            return said, None
        why = "All parts are relative to the same maximum, so they can be added as they are."
        text = f"The next scores go up to {largest:.2f}, with {self.best:.2f} the maximum. What changes in the sums?"
        wrong = (f"they are multiplied by {math.exp(largest - self.best):.2f}", "they begin again")
        return said, ask(text, "nothing yet", wrong, why)

    def rescale(self, largest: float) -> None:
        """Show the sums rescaled to a new maximum, between two frames of the kernel."""
        old, self.best = self.best, largest
        factor = math.exp(old - largest)
        self.total, self.sums = factor * self.total, [factor * value for value in self.sums]
        why = f"Each part was exp(score − {old:.2f}) and should be exp(score − {largest:.2f})."
        text = f"The maximum rises from {old:.2f} to {largest:.2f}. By what are the sums so far multiplied?"
        self.show(
            f"All sums are multiplied by exp({old:.2f} − {largest:.2f}) = {factor:.2f}. No key is read again.",
            KERNEL,
            ask(text, f"{factor:.2f}", (f"{1 / factor:.2f}", "1.00", "0.00"), why),
            factor=round(factor, 2),
        )

    def end(self) -> None:
        """Show the result, and compare with the reference kernel, which takes the softmax over all scores at once."""
        out, self.entry = self.out[:SHOWN], None
        said = f"At the end the sum of values is divided by the sum, {self.total:.2f}: attention's output."
        self.show(said, KERNEL, out=rounded(out))
        same = all(math.isclose(*pair, abs_tol=CLOSE) for pair in zip(out, self.reference, strict=True))
        verdict = "the same" if same else "something else"
        why = "Rescaling made every part what it would have been with the last maximum from the start."
        numbers = listed([f"{value:.3f}".replace("-", "−") for value in rounded(self.reference)])
        self.show(
            f"The reference kernel, all {len(self.prompt)} scores at once: {verdict}, {numbers}.",
            AT_ONCE,
            ask("And softmax over all scores at once, as the reference kernel does it?", verdict, WRONG, why),
            out=rounded(out),
            kernel=rounded(self.reference),
        )


def rounded(values) -> list[float]:
    return [round(value, 3) + 0.0 for value in values]
