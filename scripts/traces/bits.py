"""Course machinery. Lesson 17's trace: a key with an outlier, rounded to 4 bits as it is, then rotated first."""

from typing import Any

from scripts.bench.kv_quality import heavy_tailed
from scripts.traces.tape import Tape, ask, plural

import torch
from torch import Tensor

from mini_engine.attention.reference import paged_attention
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.block_table import BlockTable
from mini_engine.kv.block_tensor import KvPool, PackedRequest, plan_packed, reserve_all
from mini_engine.quantized import int4_rows, rotation

BLOCK_SIZE, NUM_BLOCKS, TOKENS = 4, 4, 8
LAYER, HEAD, KEY = 1, 0, 5  # the attention to show, and which token's key the last query meets
QUANTIZE = "mini_engine/quantized/int4_rows.py::quantize4"
PACK = "mini_engine/quantized/int4_rows.py::pack"
UNPACK = "mini_engine/quantized/int4_rows.py::unpack"
ROTATE = "mini_engine/quantized/rotation.py::rotate"
STORE = "mini_engine/kv/block_tensor.py::KvPool.set_kv"


class Bits(Tape):
    """A key's numbers, the levels that they may be rounded to, and the rounded numbers.

    shown: the numbers now. levels: least number and step of each group. rounded: the codes' values. scores:
    q · k in full precision and of both kinds of rounded keys.
    """

    def __init__(self) -> None:
        file, title = "l17_bits/bits.trace.js", "Sixteen levels for sixty-four numbers"
        super().__init__("l17-bits", file, "bits", title, 2, group=int4_rows.GROUP)
        self.shown: list[float] = []
        self.levels: list[list[float]] = []
        self.rounded: list[float] | None = None
        self.scores: dict[str, Any] = {"full": None, "plain": None, "turned": None}
        self.is_turned, self.num_bytes = False, None

    def run(self) -> None:
        """Run the random model once; keep the last token's query and an earlier token's key, in one layer and head."""
        calls: list[Any] = []

        def watched(*arguments: Any) -> Tensor:
            calls.append(arguments)
            return paged_attention(*arguments)

        model, texts = heavy_tailed()
        pool = KvPool(model.config, NUM_BLOCKS, BLOCK_SIZE, watched)
        request = PackedRequest(texts[0][:TOKENS], BlockTable(BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)))
        reserve_all([request])
        with torch.inference_mode():
            model(torch.tensor(request.token_ids), pool, plan_packed([request], BLOCK_SIZE, pool.device))
        q, k_cache, *_ = calls[LAYER]
        block = request.table.blocks[KEY // BLOCK_SIZE]
        self.q, self.key = q[-1, HEAD].clone(), k_cache[block, KEY % BLOCK_SIZE, HEAD].clone()

    def state(self) -> dict[str, Any]:
        scores = {name: score if score is None else round(score, 2) for name, score in self.scores.items()}
        shown = {"shown": self.shown, "levels": self.levels, "rounded": self.rounded, "turned": self.is_turned}
        return shown | {"scores": scores, "bytes": self.num_bytes}

    def put(self, x: Tensor) -> None:
        """Show other numbers, not rounded."""
        self.shown, self.levels, self.rounded = tenths(x), [], None

    def round(self) -> int:
        """Round the shown numbers with the engine's own code. Return the levels used in the largest one's group."""
        x = rotation.rotate(self.key) if self.is_turned else self.key
        codes, step, least = int4_rows.quantize4(x[None])
        back = int4_rows.unpack(int4_rows.pack(x[None]), len(x))[0]
        self.levels = [
            [round(a, 3) + 0.0, round(b, 3)] for a, b in zip(least[0].tolist(), step[0].tolist(), strict=True)
        ]
        self.rounded = tenths(back)
        q = rotation.rotate(self.q) if self.is_turned else self.q
        self.scores["turned" if self.is_turned else "plain"] = float(q @ back)
        group = int(x.abs().argmax()) // int4_rows.GROUP * int4_rows.GROUP
        return len(set(codes[0, group : group + int4_rows.GROUP].tolist()))

    def record(self) -> None:
        self.run()
        self.scores["full"] = float(self.q @ self.key)
        self.plain()
        self.turned()

    def plain(self) -> None:
        """Show the key as it is, and rounded."""
        dim, largest = len(self.key), float(self.key.abs().max())
        self.put(self.key)
        others = self.key.abs().sort().values[:-1]
        self.show(
            f"A key of {dim} numbers with an outlier, as in trained models: {largest:.1f}, the others up to "
            f"{float(others[-1]):.1f}.",
            STORE,
        )
        used = self.round()
        step = max(step for _, step in self.levels)
        others = (2, 8, 16)
        self.show(
            f"{int4_rows.GROUP} numbers share 16 levels. The outlier decides its group's step, {step:.2f}: only "
            f"{used} levels are used.",
            QUANTIZE,
            ask(
                "The group with the outlier has 16 levels. On how many of them do its 32 numbers fall?",
                used,
                others,
                "The levels are evenly spaced from the least to the largest number, and all but one lie at one end.",
            ),
        )
        self.show(
            f"A score suffers: q · k is {self.scores['full']:.2f}, with the rounded key {self.scores['plain']:.2f}.",
            UNPACK,
        )

    def turned(self) -> None:
        """Show the key rotated, and then rounded."""
        turned = rotation.rotate(self.key)
        largest = float(turned.abs().max())
        self.is_turned = True
        self.put(turned)
        self.show(
            f"Rotated: each number is a sum of all {len(self.key)}, divided by {len(self.key) ** 0.5:g}. "
            f"The largest is {largest:.1f}; nothing is lost.",
            ROTATE,
            ask(
                f"The key is rotated. Its largest number was {float(self.key.abs().max()):.1f}. What is it now?",
                f"{largest:.1f}",
                (f"{float(self.key.abs().max()):.1f}", f"{largest * 2.5:.1f}"),
                "The outlier is divided by √64 = 8 and is a part of every number now; the others add to it.",
            ),
        )
        used = self.round()
        step = max(step for _, step in self.levels)
        self.show(
            f"16 levels for each group again. The larger step is {step:.2f}, and {used} levels are in use.", QUANTIZE
        )
        self.stored(int4_rows.pack(turned[None]))

    def stored(self, row: Tensor) -> None:
        """Show the rotated key's row, its score, and the key that it encodes."""
        full, plain, turned = self.scores.values()
        self.num_bytes = row.numel() * row.element_size()
        self.show(
            f"Two codes a byte, a step and a least number a group: {plural(self.num_bytes, 'byte')}, not bfloat16's "
            f"{2 * len(self.key)}.",
            PACK,
        )
        self.show(
            f"The query is rotated too: (Hq) · (Hk) = q · k. With the rounded key, {turned:.2f} instead of {full:.2f}.",
            ROTATE,
            ask(
                f"q · k is {full:.2f}; with the key rounded as it is, {plain:.2f}. And now?",
                f"{turned:.2f}",
                (f"{plain:.2f}", f"{full / 8:.2f}"),
                "Both are rotated, so the score stays; and the steps have become small.",
            ),
        )
        back = rotation.rotate(int4_rows.unpack(row, len(self.key))[0])
        as_it_is = int4_rows.unpack(int4_rows.pack(self.key[None]), len(self.key))[0]
        self.is_turned, self.shown, self.levels, self.rounded = False, tenths(self.key), [], tenths(back)
        off, off_plain = (float((x - self.key).abs().max()) for x in (back, as_it_is))
        self.show(
            f"Rotated back, only to look: a number is off by {off:.2f} at most, and was off by {off_plain:.2f}.",
            ROTATE,
        )


def tenths(x: Tensor) -> list[float]:
    """Return numbers to draw, with two digits: further digits may differ between machines."""
    return [round(value, 2) + 0.0 for value in x.tolist()]
