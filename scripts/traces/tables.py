"""Course machinery. Lesson 3's trace: block tables, two views of the same bytes, and a kernel that walks a table."""

import math
from collections.abc import Sequence
from typing import Any

from scripts.traces.tape import Tape, ask, listed, plural, ranges
from scripts.traces.walk import Watched, kept_by_kernel

import torch

from lessons.l3_block_tensor import packed
from mini_engine.attention.blockwise import paged_attention
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.block_table import BlockTable
from mini_engine.kv.block_tensor import ForwardMeta, KvPool, PackedRequest, plan_packed, reserve_all

BLOCK_SIZE, NUM_BLOCKS = 4, 8
PROMPTS = {"A": "Once upon a time", "B": "The capital of France is", "C": "Count: one, two, three"}
LAYER, HEAD = 1, 0  # the attention to show
POOL = "mini_engine/kv/block_tensor.py"
TABLE = "mini_engine/kv/block_table.py::BlockTable"
KERNEL = "mini_engine/attention/blockwise.py::attend_blocks"


class Tables(Tape):
    """One real pool, its allocator and the requests in it. plan: of a packed step, as plain lists."""

    def __init__(self) -> None:
        file, title = "l3_block_tensor/tables.trace.js", "Tables, and two views of the bytes"
        super().__init__("l3-tables", file, "tables", title, 12, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
        self.kernel = Watched(paged_attention)
        self.pool = KvPool(self.model.config, NUM_BLOCKS, BLOCK_SIZE, self.kernel)
        self.allocator = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)
        self.requests: dict[str, PackedRequest] = {}
        self.slots: list[str | None] = [None] * (BLOCK_SIZE * NUM_BLOCKS)
        self.plan: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        tables = [
            {"name": name, "blocks": list(request.table.blocks), "tokens": request.table.num_tokens}
            for name, request in self.requests.items()
        ]
        pool = {"slots": list(self.slots), "free": list(self.allocator.free_blocks), "wrote": []}
        return {"view": "blocks", "tables": tables, "plan": self.plan, "walk": None} | pool

    def record(self) -> None:
        """Record the story: a packed prefill, a decode, a later request, and two walks of the kernel."""
        self.show(
            f"{NUM_BLOCKS} blocks of {BLOCK_SIZE} slots. Block 0, the null block, only pads short rows of the block "
            "table.",
            f"{POOL}::KvPool",
        )
        self.first_step()
        self.walk("B", is_first=True)
        self.second_step()
        self.third_step()
        self.walk("C", query=4)
        self.show(
            f"One call served a decode and a prefill. B chose “{self.word('B')}”, C chose “{self.word('C')}”.",
            "mini_engine/engine/loop.py::next_token",
        )

    def arrive(self, name: str) -> int:
        ids = self.tokenizer.encode(PROMPTS[name])
        self.requests[name] = PackedRequest(ids, BlockTable(self.allocator))
        return len(ids)

    def reserve(self) -> dict[str, list[int]]:
        """Reserve room for every request's next step; return the new blocks of each."""
        self.plan, before = None, {name: len(request.table.blocks) for name, request in self.requests.items()}
        reserve_all(list(self.requests.values()))
        return {name: request.table.blocks[before[name] :] for name, request in self.requests.items()}

    def make_plan(self) -> dict[str, Any]:
        """Plan the next step, show its plan from now on, and return it."""
        self.meta = meta = plan_packed(list(self.requests.values()), BLOCK_SIZE, self.pool.device)
        tensors = (meta.block_table, meta.cu_seqlens_q, meta.seq_lens_kv, meta.slot_mapping)
        self.plan = dict(zip(("rows", "starts", "lens", "slots"), (one.tolist() for one in tensors), strict=True))
        return self.plan

    def run(self) -> list[int]:
        """Run the packed step; return the slots written."""
        self.kernel.calls.clear()
        with torch.inference_mode():
            packed.step(self.model, self.pool, list(self.requests.values()), BLOCK_SIZE)
        self.note_writes(self.meta)
        return self.meta.slot_mapping.tolist()

    def note_writes(self, meta: ForwardMeta) -> None:
        bounds = meta.cu_seqlens_q.tolist()
        for s, name in enumerate(self.requests):
            for row in range(bounds[s], bounds[s + 1]):
                self.slots[int(meta.slot_mapping[row])] = f"{name}{int(meta.positions[row])}"

    def word(self, name: str) -> str:
        return self.words(self.requests[name].output_ids[-1:])[0]

    def first_step(self) -> None:
        counts = {name: self.arrive(name) for name in "AB"}
        blocks = self.reserve()
        text = "A arrives first, and the pool is empty. Which block does it get?"
        why = "Block 0 is the null block; it is never on the free list."
        self.show(
            f"A arrives with {counts['A']} tokens and takes block {listed(blocks['A'])}. B has {counts['B']} and takes "
            f"blocks {listed(blocks['B'])}.",
            f"{POOL}::reserve_all",
            ask(text, listed(blocks["A"]), ("0", "7"), why),
        )
        rows = self.make_plan()["rows"]
        text = "B's row of the block table has two entries. What follows A's only block in its row?"
        why = "Every entry must be a block that exists. Its contents do not matter, because they are never read."
        self.show(
            f"Both run in one packed step. A's row of the block table is {rows[0]}, padded with the null block.",
            f"{POOL}::plan_packed",
            ask(text, rows[0][-1], (-1, "nothing", 4), why),
        )
        self.write_flat()

    def write_flat(self) -> None:
        """Show the flat view, through which the step writes, and then the block view again."""
        self.show(
            f"The flat view of the same bytes, {NUM_BLOCKS * BLOCK_SIZE} slots: slot = block × {BLOCK_SIZE} + offset. "
            "Nothing has moved.",
            f"{TABLE}.slots",
            view="flat",
        )
        wrote = self.run()
        self.show(
            f"Writes use the flat view: {len(wrote)} tokens, slots {ranges(wrote)}, mapped as in lesson 2.",
            f"{POOL}::KvPool.set_kv",
            view="flat",
            wrote=wrote,
        )
        self.show(
            f"A chose “{self.word('A')}”, B chose “{self.word('B')}”. How did B's last token read its history, block "
            "by block?",
            f"{POOL}::KvPool.attend",
        )

    def walk(self, name: str, query: int | None = None, is_first: bool = False) -> None:
        """Show a frame for each block that a query reads, with the running sum of its softmax."""
        s = list(self.requests).index(name)
        (q, k_cache, v_cache, (starts, lens, table), scale), _ = self.kernel.calls[LAYER]
        start, stop, length = int(starts[s]), int(starts[s + 1]), int(lens[s])
        query = stop - start - 1 if query is None else query
        position = length - (stop - start) + query
        kept, _ = kept_by_kernel(q[start:stop], k_cache, v_cache, table[s].tolist(), length, scale, query, HEAD)
        best, seen = -math.inf, []
        row = self.requests[name].table.blocks[: position // BLOCK_SIZE + 1]
        for entry, (block, one) in enumerate(zip(row, kept, strict=False)):
            scores = [round(score, 2) for score in one.scores if score > -math.inf]  # the others are masked
            new = round(one.best, 2)
            seen += [[block * BLOCK_SIZE + offset, score] for offset, score in enumerate(scores)]
            say = f"Query {name}{position} reads {plural(len(scores), 'key')} of block {block} in place. "
            if entry == 0:
                say += f"Largest score {new:.2f}; sum {one.total:.2f}."
            elif new > best:
                factor = math.exp(best - new)  # of the numbers shown, so that it can be checked by hand
                say += f"{new:.2f} is larger: the sum so far × {factor:.2f}; now {one.total:.2f}."
            else:
                say += f"No larger score, so nothing is rescaled. Sum {one.total:.2f}."
            best, place = new, {"s": s, "entry": entry, "query": f"{name}{position}"}
            sums = {"seen": seen[:], "best": new, "sum": round(one.total, 2)}
            self.show(say, KERNEL, question_of(name, position, entry, row, is_first), walk=place | sums)

    def second_step(self) -> None:
        blocks = self.reserve()
        self.show(
            f"Decode: one token each. A's block is full, so its table grows by block {listed(blocks['A'])}. B has "
            "room.",
            f"{TABLE}.append",
        )
        plan = self.make_plan()
        wrote = self.run()
        self.show(
            f"Two rows in, slots {listed(wrote)} written. The table: {listed(plan['rows'])}; "
            f"A sees {plan['lens'][0]} keys, B {plan['lens'][1]}.",
            f"{POOL}::KvPool.set_kv",
            view="flat",
            wrote=wrote,
        )

    def third_step(self) -> None:
        gone = self.requests.pop("A")
        blocks = list(gone.table.blocks)
        gone.table.free()
        self.plan = None
        self.show(f"A has ended. Its table is empty; blocks {listed(blocks)} are free.", f"{TABLE}.free")
        count = self.arrive("C")
        blocks = self.reserve()["C"]
        said = f"C arrives with {count} tokens and takes blocks {listed(blocks)}: freed last, handed out first."
        self.show(said, f"{POOL}::reserve_all")
        starts = self.make_plan()["starts"]
        text = "B feeds 1 token and C feeds 7. How many rows does the packed step have?"
        why = "Rows follow one another, with no padding between sequences."
        self.show(
            f"One call decodes for B and prefills C. cu_seqlens_q {starts}: row 0 is B's, 1 … {starts[2] - 1} are C's.",
            f"{POOL}::plan_packed",
            ask(text, starts[-1], (2, 7, 14), why),
        )
        wrote = self.run()
        said = f"One call writes all {len(wrote)}: slots {ranges(wrote)}."
        self.show(said, f"{POOL}::KvPool.set_kv", view="flat", wrote=wrote)


def question_of(name: str, position: int, entry: int, row: Sequence[int], is_first: bool):
    """Return a question about a block on a walk, or None."""
    keys = position + 1 - entry * BLOCK_SIZE
    if is_first and entry == 1:
        why = (
            f"B has {position + 1} tokens, {BLOCK_SIZE} of them in the previous block. The rest of its last block "
            "is not written."
        )
        return ask(f"The next block is {row[1]}. How many of its keys does the query read?", keys, (4, 2, 0), why)
    if not is_first and entry == 0:
        why = "Its row of the table follows the order of its tokens, whatever the block ids are."
        return ask(f"Which block does C's token {position} read first?", row[0], (min(row), max(row), 0), why)
    if not is_first and entry == len(row) - 1:
        why = (
            f"Query {position} sees keys 0 … {position}: the causal mask is aligned to the bottom right. "
            "Later keys are masked out."
        )
        text = f"Block {row[-1]} holds the end of {name}. How many of its keys does this query see?"
        return ask(text, keys, (2, 3, 4), why)
    return None
