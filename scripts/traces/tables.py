"""Course machinery. Lesson 3's trace: block tables, two views of the same bytes, and a kernel that walks a table."""

import math
from typing import Any, TypedDict

from scripts.traces.tape import Tape, ask, listed, plural, ranges
from scripts.traces.walk import Kept, kept_by_kernel

BLOCK_SIZE, NUM_BLOCKS = 4, 8
PROMPTS = {"A": "Once upon a time", "B": "The capital of France is", "C": "Count: one, two, three"}
LAYER, HEAD = 1, 0  # the attention to show
POOL = "mini_engine/kv/block_tensor.py"
TABLE = "mini_engine/kv/block_table.py::BlockTable"
KERNEL = "mini_engine/attention/blockwise.py::attend_blocks"


def tape() -> Tape:
    scene = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS}
    return Tape(
        "l3-tables", "l3_block_tensor/tables.trace.js", "tables", "Tables, and two views of the bytes", scene, 12
    )


class Watching:
    """The kernel; records the arguments of its calls in the last step."""

    def __init__(self) -> None:
        from mini_engine.attention.blockwise import paged_attention

        self.kernel, self.calls = paged_attention, []

    def __call__(self, *arguments):
        self.calls.append(arguments)
        return self.kernel(*arguments)

    def kept_of(self, s: int, query: int) -> list[Kept]:
        """Return what the kernel keeps after each block, of sequence s and the query with this index in it."""
        q, k_cache, v_cache, starts, lens, table, scale = self.calls[LAYER]
        rows = q[int(starts[s]) : int(starts[s + 1])]
        return kept_by_kernel(rows, k_cache, v_cache, table[s].tolist(), int(lens[s]), scale, query, HEAD)


class Plan(TypedDict):
    """A packed step's plan as plain lists, as the player reads it."""

    rows: list[list[int]]
    starts: list[int]
    lens: list[int]
    slots: list[int]


class Desk:
    """One real pool, its allocator and the requests in it."""

    def __init__(self, tape: Tape) -> None:
        from mini_engine.checkpoint.weights import load_model
        from mini_engine.kv.allocator import BlockAllocator
        from mini_engine.kv.block_tensor import KvPool
        from mini_engine.pocket import POCKET_DIR
        from mini_engine.text.tokenizer import Tokenizer

        self.tape = tape
        self.model, self.tokenizer = load_model(POCKET_DIR), Tokenizer(POCKET_DIR)
        self.kernel = Watching()
        self.pool = KvPool(self.model.config, NUM_BLOCKS, BLOCK_SIZE, self.kernel)
        self.allocator = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)
        self.requests: dict[str, Any] = {}
        self.slots: list[str | None] = [None] * (BLOCK_SIZE * NUM_BLOCKS)
        self.plan: Plan | None = None

    def show(self, say: str, question=None, view: str = "blocks", wrote=(), walk=None, *, code: str) -> None:
        tables = [
            {"name": name, "blocks": list(request.table.blocks), "tokens": request.table.num_tokens}
            for name, request in self.requests.items()
        ]
        state = {"view": view, "tables": tables, "slots": list(self.slots), "plan": self.plan, "walk": walk}
        self.tape.frame(say, question, code, wrote=list(wrote), free=list(self.allocator.free_blocks), **state)

    def arrive(self, name: str) -> int:
        from mini_engine.kv.block_table import BlockTable
        from mini_engine.kv.block_tensor import PackedRequest

        ids = self.tokenizer.encode(PROMPTS[name])
        self.requests[name] = PackedRequest(ids, BlockTable(self.allocator))
        return len(ids)

    def reserve(self) -> dict[str, list[int]]:
        """Reserve room for every request's next step; return the new blocks of each."""
        from mini_engine.kv.block_tensor import reserve_all

        before = {name: len(request.table.blocks) for name, request in self.requests.items()}
        reserve_all(list(self.requests.values()))
        return {name: request.table.blocks[before[name] :] for name, request in self.requests.items()}

    def make_plan(self) -> Plan:
        """Plan the next step, show its plan from now on, and return it."""
        import torch

        from mini_engine.kv.block_tensor import plan_packed

        self.meta = plan_packed(list(self.requests.values()), BLOCK_SIZE, torch.device("cpu"))
        self.plan = {
            "rows": self.meta.block_table.tolist(),
            "starts": self.meta.cu_seqlens_q.tolist(),
            "lens": self.meta.seq_lens_kv.tolist(),
            "slots": self.meta.slot_mapping.tolist(),
        }
        return self.plan

    def run(self) -> list[int]:
        """Run the packed step as `generate_packed` does; return the slots written."""
        import torch

        from mini_engine.engine.loop import next_token

        requests, meta = list(self.requests.values()), self.meta
        fed = [token for request in requests for token in request.token_ids[request.cur_len :]]
        self.kernel.calls.clear()
        with torch.inference_mode():
            logits = self.model(torch.tensor(fed), self.pool, meta, rows=meta.cu_seqlens_q[1:].long() - 1)
        self.note_writes(meta)
        for request, row in zip(requests, logits, strict=True):
            request.cur_len = len(request.token_ids)
            request.output_ids.append(next_token(row))
        return meta.slot_mapping.tolist()

    def note_writes(self, meta) -> None:
        names = list(self.requests)
        bounds = meta.cu_seqlens_q.tolist()
        for s, name in enumerate(names):
            for row in range(bounds[s], bounds[s + 1]):
                self.slots[int(meta.slot_mapping[row])] = f"{name}{int(meta.positions[row])}"

    def word(self, name: str) -> str:
        return self.tokenizer.token_bytes[self.requests[name].output_ids[-1]].decode("utf-8", "replace").strip()


def record(tape: Tape) -> None:
    """Record the story: a packed prefill, a decode, a later request, and two walks of the kernel."""
    desk = Desk(tape)
    desk.show(
        f"{NUM_BLOCKS} blocks of {BLOCK_SIZE} slots. Block 0 is the null block: it is never handed out, and short rows "
        "of the block table are padded with it.",
        code=f"{POOL}::KvPool",
    )
    first_step(desk)
    walk(desk, "B", is_first=True)
    second_step(desk)
    third_step(desk)
    walk(desk, "C", query=4)
    finish(desk)


def first_step(desk: Desk) -> None:
    counts = {name: desk.arrive(name) for name in "AB"}
    blocks = desk.reserve()
    desk.show(
        f"A arrives with {counts['A']} tokens and takes block {listed(blocks['A'])}. B has {counts['B']} and takes "
        f"blocks {listed(blocks['B'])}.",
        ask(
            "A arrives first, and the pool is empty. Which block does it get?",
            listed(blocks["A"]),
            ("0", "7"),
            "Block 0 is the null block; it is never on the free list.",
        ),
        code=f"{POOL}::reserve_all",
    )
    rows = desk.make_plan()["rows"]
    desk.show(
        f"Both run in one packed step. The block table is a rectangle, so A's row is {rows[0]}, padded with the null "
        "block.",
        ask(
            "B's row of the block table has two entries. What follows A's only block in its row?",
            rows[0][-1],
            (-1, "nothing", 4),
            "Every entry must be a block that exists. Its contents do not matter, because they are never read.",
        ),
        code=f"{POOL}::plan_packed",
    )
    write_flat(desk)


def write_flat(desk: Desk) -> None:
    """Show the flat view, through which the step writes, and then the block view again."""
    desk.show(
        f"The same bytes as one row of {NUM_BLOCKS * BLOCK_SIZE} slots: the flat view. Nothing has moved in memory; "
        f"slot = block × {BLOCK_SIZE} + offset.",
        view="flat",
        code=f"{TABLE}.slots",
    )
    wrote = desk.run()
    desk.show(
        f"Writes go through the flat view: {len(wrote)} tokens, slots {ranges(wrote)}. The slot mapping is the same "
        "as in lesson 2.",
        view="flat",
        wrote=wrote,
        code=f"{POOL}::KvPool.set_kv",
    )
    desk.show(
        f"Back to the block view, for reading. A chose “{desk.word('A')}”, B chose “{desk.word('B')}”. How did B's "
        "last token see its history?",
        code=f"{POOL}::KvPool.attend",
    )


def walk(desk: Desk, name: str, query: int | None = None, is_first: bool = False) -> None:
    """Show a frame for each block that a query reads, with the running sum of its softmax."""
    s = list(desk.requests).index(name)
    start, stop = (int(row) for row in desk.meta.cu_seqlens_q[s : s + 2])
    query = stop - start - 1 if query is None else query
    position = int(desk.meta.seq_lens_kv[s]) - (stop - start) + query
    best, seen = -math.inf, []
    row = desk.requests[name].table.blocks[: position // BLOCK_SIZE + 1]
    for entry, (block, kept) in enumerate(zip(row, desk.kernel.kept_of(s, query), strict=False)):
        scores = [round(score, 2) for score in kept.scores if score > -math.inf]  # the others are masked
        new, total = round(kept.best, 2), kept.total
        factor = math.exp(best - new)  # of the numbers shown, so that it can be checked by hand
        seen += [[block * BLOCK_SIZE + offset, score] for offset, score in enumerate(scores)]
        say = f"Query {name}{position} reads {plural(len(scores), 'key')} of block {block}, in place. "
        if entry == 0:
            say += f"Largest score {new:.2f}, sum of exp(score − largest) {total:.2f}."
        elif new > best:
            say += (
                f"A larger score, {new:.2f}, so the sum so far is multiplied by exp({best:.2f} − {new:.2f}) = "
                f"{factor:.2f}. Sum {total:.2f}."
            )
        else:
            say += f"No larger score, so nothing is rescaled. Sum {total:.2f}."
        question = question_of(desk, name, position, entry, row, is_first)
        best = new
        desk.show(
            say,
            question,
            walk={
                "s": s,
                "entry": entry,
                "query": f"{name}{position}",
                "seen": seen[:],
                "best": new,
                "sum": round(total, 2),
            },
            code=KERNEL,
        )


def question_of(desk: Desk, name: str, position: int, entry: int, row: list[int], is_first: bool):
    if is_first and entry == 1:
        keys = position + 1 - BLOCK_SIZE
        why = (
            f"B has {position + 1} tokens, {BLOCK_SIZE} of them in the previous block. The rest of its last block "
            "is not written."
        )
        return ask(f"The next block is {row[1]}. How many of its keys does the query read?", keys, (4, 2, 0), why)
    if not is_first and entry == 0:
        why = "Its row of the table follows the order of its tokens, whatever the block ids are."
        return ask(f"Which block does C's token {position} read first?", row[0], (min(row), max(row), 0), why)
    if not is_first and entry == len(row) - 1:
        keys = position + 1 - entry * BLOCK_SIZE
        why = (
            f"Query {position} sees keys 0 … {position}: the causal mask is aligned to the bottom right. "
            "Later keys are masked out."
        )
        return ask(
            f"Block {row[-1]} holds the end of C. How many of its keys does this query see?", keys, (2, 3, 4), why
        )
    return None


def second_step(desk: Desk) -> None:
    desk.plan = None
    blocks = desk.reserve()
    desk.show(
        f"Decode: one token each. A's block is full, so its table grows by block {listed(blocks['A'])}. B has room.",
        code=f"{TABLE}.append",
    )
    plan = desk.make_plan()
    wrote = desk.run()
    desk.show(
        f"Two rows in, two slots written: {listed(wrote)}. The table's rows are {listed(plan['rows'])}; "
        f"A sees {plan['lens'][0]} keys, B {plan['lens'][1]}.",
        view="flat",
        wrote=wrote,
        code=f"{POOL}::KvPool.set_kv",
    )


def third_step(desk: Desk) -> None:
    gone = desk.requests.pop("A")
    blocks = list(gone.table.blocks)
    gone.table.free()
    desk.plan = None
    desk.show(f"A has ended. Its table is empty; blocks {listed(blocks)} are free.", code=f"{TABLE}.free")
    count = desk.arrive("C")
    blocks = desk.reserve()["C"]
    said = f"C arrives with {count} tokens and takes blocks {listed(blocks)}: freed last, handed out first."
    desk.show(said, code=f"{POOL}::reserve_all")
    plan = desk.make_plan()
    desk.show(
        f"One call decodes for B and prefills C. cu_seqlens_q {plan['starts']} says which rows belong to which "
        f"sequence: B has row 0, C has rows 1 … {plan['starts'][2] - 1}.",
        ask(
            "B feeds 1 token and C feeds 7. How many rows does the packed step have?",
            plan["starts"][-1],
            (2, 7, 14),
            "Rows follow one another, with no padding between sequences.",
        ),
        code=f"{POOL}::plan_packed",
    )
    wrote = desk.run()
    said = f"One call writes all {len(wrote)}: slots {ranges(wrote)}."
    desk.show(said, view="flat", wrote=wrote, code=f"{POOL}::KvPool.set_kv")


def finish(desk: Desk) -> None:
    said = f"One call served a decode and a prefill. B chose “{desk.word('B')}”, C chose “{desk.word('C')}”."
    desk.show(said, code="mini_engine/engine/loop.py::next_token")
