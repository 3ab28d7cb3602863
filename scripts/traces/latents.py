"""Course machinery. Lesson 16's trace: a token's latent is written once, and each block is read once for all heads."""

import math
from typing import Any
from unittest.mock import patch

from scripts.traces.tape import Tape, ask, listed, plural

import torch

from mini_engine.attention.registry import load_kernel
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.block_table import BlockTable
from mini_engine.kv.block_tensor import KvPool, PackedRequest, plan_packed, reserve_all
from mini_engine.latents import attention, reading
from mini_engine.latents.store import LatentKv

MODEL = "pocket-latent"
BLOCK_SIZE, NUM_BLOCKS = 4, 8
PROMPT, GONE = "Once upon a time there was a small cat. The cat was very", ("Hello", "The capital of France is")
LAYER = 2  # the attention to show
SHOWN = 2  # of a result's numbers
CLOSE = 1e-4
FORWARD = "mini_engine/latents/model.py::LatentAttention.forward"
ABSORBED = "mini_engine/latents/reading.py::absorbed_attention"
WALK = "mini_engine/latents/attention.py::attend_blocks"
SUMS = "mini_engine/latents/attention.py::RunningSums.add"
EXPANDED = "mini_engine/latents/reading.py::expanded_attention"


class Heard:
    """A store that keeps the arguments of one layer's last attention."""

    def __init__(self, store: LatentKv) -> None:
        self.store = store

    def set_kv(self, layer: int, slots: Any, k: Any, v: Any) -> None:
        self.store.set_kv(layer, slots, k, v)
        if layer == LAYER:
            self.slots, self.written = slots.tolist(), (k.numel(), v.numel())

    def attend_latents(self, layer: int, q: Any, kv_b: Any, meta: Any) -> Any:
        if layer == LAYER:
            self.q, self.kv_b = q, kv_b
        return self.store.attend_latents(layer, q, kv_b, meta)


class Latents(Tape):
    """The last token's attention in one layer: each token's stored latent, and what the walk reads and keeps.

    reads: the number of reads of each block. parts: for each head, exp(score − largest) of the keys so far.
    """

    def __init__(self) -> None:
        file, title = "l16_latents/latents.trace.js", "One latent, many heads"
        super().__init__("l16-latents", file, "latents", title, 5, block_size=BLOCK_SIZE, name="A")
        self.reads: list[int] = []
        self.scores: list[list[float]] = []  # of each head
        self.largest: list[float] = []
        self.num_added = 0

    def run(self) -> None:
        """Run the prompt, then its last token alone, with latents in blocks that are not in order."""
        from mini_engine.assembly.loading import load

        model: Any = load(MODEL, "float32", "cpu")
        config, allocator = model.config, BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)
        pool = KvPool(config, NUM_BLOCKS, BLOCK_SIZE, load_kernel("reference", latents=True))
        *gone, ids = [self.tokenizer.encode(prompt) for prompt in (*GONE, PROMPT)]
        others = [PackedRequest(one, BlockTable(allocator)) for one in gone]
        reserve_all(others)
        for one in others:
            one.table.free()
        request, store = PackedRequest(ids[:-1], BlockTable(allocator)), Heard(LatentKv(config, pool))
        with torch.inference_mode():
            for last in (None, ids[-1]):
                if last is not None:
                    request.cur_len = len(request.prompt_ids)
                    request.output_ids.append(last)
                reserve_all([request])
                plan = plan_packed([request], BLOCK_SIZE, pool.device)
                model(torch.tensor(ids[request.cur_len : len(request.token_ids)]), store, plan)
        self.words_shown, self.table, self.config = self.words(ids), list(request.table.blocks), config
        self.caches, self.heard, self.ids = (pool.K[LAYER], pool.V[LAYER]), store, torch.tensor(self.table)
        self.reads = [0] * len(self.table)
        self.scores = [[] for _ in range(config.num_attention_heads)]
        self.largest = [-math.inf] * config.num_attention_heads

    def walk(self) -> None:
        """Run the walk over the blocks; keep its reads and sums after each of them."""
        tape, self.walked, self.shapes = self, list[dict[str, Any]](), list[tuple[int, ...]]()
        counts = [0] * len(self.table)

        def read(rows: Any, dim: int, dtype: Any) -> Any:
            if dim == self.config.kv_lora_rank:
                block = next(b for b in self.table if rows.data_ptr() == self.caches[0][b].data_ptr())
                counts[self.table.index(block)] += 1
            return rows

        class Sums(attention.RunningSums):
            def add(self, scores: Any, weigh: Any) -> None:
                before = self.largest.clone()
                super().add(scores, weigh)
                tape.walked.append(
                    {
                        "scores": scores[0].tolist(),
                        "largest": self.largest[0, :, 0].tolist(),
                        "rose": [h for h, (a, b) in enumerate(zip(before[0], self.largest[0], strict=True)) if b > a],
                        "reads": list(counts),
                    }
                )

        def attend(q: Any, q_rope: Any) -> Any:
            self.shapes += [tuple(q.shape), tuple(q_rope.shape)]
            kv_len = len(self.words_shown)
            return attention.attend_blocks(
                q, q_rope, *self.caches, self.table, kv_len, self.config.attention_scale, read
            )

        with torch.inference_mode(), patch.object(attention, "RunningSums", Sums):
            self.out = reading.absorbed_attention(self.heard.q, self.heard.kv_b, self.config, attend)[0]
        if len(self.walked) != len(self.table):
            raise ValueError(
                f"attend_blocks added {len(self.walked)} pieces for {len(self.table)} blocks; add each to RunningSums"
            )

    def state(self) -> dict[str, Any]:
        heads = [
            {
                "parts": [round(math.exp(score - largest), 3) for score in scores[: self.num_added]],
                "largest": None if math.isinf(largest) else round(largest, 2),
            }
            for scores, largest in zip(self.scores, self.largest, strict=True)
        ]
        shown = {"table": self.table, "words": self.words_shown, "reads": list(self.reads), "heads": heads}
        return shown | {"entry": None, "rose": [], "marked": None, "out": None, "expanded": None}

    def record(self) -> None:
        """Write the last token's latent, walk over the blocks, and compare with expanded keys and values."""
        self.run()
        self.about_writing()
        self.walk()
        self.about_absorbing()
        for entry in range(len(self.table)):
            self.block(entry)
        self.end()

    def about_writing(self) -> None:
        """Show the last token's stored latent."""
        c = self.config
        (slot,), (latent, rotary) = self.heard.slots, self.heard.written
        made = c.num_attention_heads * (c.qk_head_dim + c.v_head_dim)
        text = f"The prompt's last token, “{self.words_shown[-1]}”, is computed."
        self.show(
            f"{text} The cache has latents and rotary keys before it.",
            FORWARD,
        )
        why = f"A latent of {latent} numbers and a rotary key of {rotary}, for all heads together."
        self.show(
            f"Written once, to slot {slot % BLOCK_SIZE} of block {slot // BLOCK_SIZE}: {latent} + {rotary} numbers. "
            f"Keys and values would be {made}, {made / (latent + rotary):.1f} times.",
            FORWARD,
            ask(f"{text} How many numbers are written in this layer?", latent + rotary, (rotary, made // 2, made), why),
            marked=len(self.words_shown) - 1,
        )

    def about_absorbing(self) -> None:
        """Show the absorbed queries."""
        c = self.config
        (*_, rank), (*_, rope) = self.shapes
        self.show(
            f"W_UK turns {c.qk_nope_head_dim} numbers of each query into {rank}, to meet latents; {rope} meet the "
            "rotary key.",
            ABSORBED,
        )

    def block(self, entry: int) -> None:
        """Show a block being read, scored by all heads and added up."""
        kept, heads = self.walked[entry], len(self.scores)
        self.reads, self.largest = kept["reads"], kept["largest"]
        count = len(kept["scores"][0])
        for mine, new in zip(self.scores, kept["scores"], strict=True):
            mine += new
        self.num_added += count
        block = self.table[entry]
        best = [max(range(count), key=scores.__getitem__) for scores in kept["scores"]]
        words = [f"“{self.words_shown[entry * BLOCK_SIZE + i]}”" for i in best]
        question = None
        if entry == 0:
            text = f"Block {block} holds {plural(count, 'latent')}. How often is it read for {heads} heads?"
            why = "Every head's key, and every head's value, is made of the same latent."
            question = ask(text, self.reads[0], (2, heads, 2 * heads), why)
            said = f"Block {block} is read once: all {heads} heads score its latents, then add them up as values."
        elif kept["rose"]:
            names = listed([f"head {h}" for h in kept["rose"]], "finds", "find")
            said = f"Block {block}, read once: {names} a larger score; bars shrink."
        else:
            said = f"Block {block}, read once: no head finds a larger score."
        if entry and len(set(words)) > 1:
            said += " Heads look at different tokens."
        self.show(said, SUMS if entry else WALK, question, entry=entry, rose=kept["rose"] if entry else [])

    def end(self) -> None:
        """Show the result, and that of expanded keys and values."""
        c, kv_len = self.config, len(self.words_shown)
        rank, out = c.kv_lora_rank, [[round(x, 3) + 0.0 for x in row[:SHOWN].tolist()] for row in self.out]
        self.show(
            f"W_UV turns each head's sum of latents, {rank} numbers, into {c.v_head_dim}: once, not for {kv_len} "
            "tokens.",
            ABSORBED,
            out=out,
        )
        with torch.inference_mode():
            other = reading.expanded_attention(self.heard.q, self.caches, self.ids, kv_len, self.heard.kv_b, c)[0]
        expanded = [[round(x, 3) + 0.0 for x in row[:SHOWN].tolist()] for row in other]
        same = bool((other - self.out).abs().max() < CLOSE)
        made = kv_len * c.num_attention_heads * (c.qk_head_dim + c.v_head_dim)
        verdict = "the same" if same else "something else"
        why = "q · (W_UK c) = (W_UKᵀ q) · c: the same products in another order."
        self.show(
            f"Expanded first, {kv_len} latents become {made:,} numbers, and ordinary attention gives {verdict}.",
            EXPANDED,
            ask(
                "And if all latents are expanded to keys and values first?",
                verdict,
                ("the same, but only in the first block", "something else"),
                why,
            ),
            out=out,
            expanded=expanded,
        )
