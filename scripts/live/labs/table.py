"""Course machinery. Lesson 3's lab: block tables grow, are cut and are freed, beside the null block."""

from typing import Any

from scripts.live.labs.events import Event, whole_number, words_of
from scripts.live.labs.lab import Knob, Lab, Preset, percent
from scripts.live.labs.rules import table_rules
from scripts.traces.tape import Tape, listed, plural

from mini_engine.errors import OutOfBlocks, UserError

ALLOCATOR = "mini_engine/kv/allocator.py::BlockAllocator"
TABLE = "mini_engine/kv/block_table.py::BlockTable"


class Tables:
    """One block table for each request."""

    def __init__(self, tape: Tape, settings: dict[str, Any]) -> None:
        from mini_engine.kv.allocator import BlockAllocator

        self.tape, self.size = tape, settings["size"]
        self.allocator = BlockAllocator(settings["blocks"], self.size)
        self.tables: dict[str, Any] = {}
        self.slots: list[str | None] = [None] * (settings["blocks"] * self.size)
        tape.scene |= {"block_size": self.size, "num_blocks": settings["blocks"]}
        self.show(
            f"{settings['blocks']} blocks of {self.size} slots. Block 0 is the null block, which is never handed out.",
            code=ALLOCATOR,
        )

    def happen(self, event: Event) -> None:
        if event.kind == "+":
            self.arrive(event.name, len(words_of(event.text)))
        elif event.kind == "!":
            self.cut(event.name, whole_number(event.text, 0, 99, "the length"))
        elif event.kind == "-":
            self.leave(event.name)
        else:
            for name in list(self.tables):
                self.append(name, 1, f"{name} decodes:")

    @property
    def alive(self) -> list[str]:
        return list(self.tables)

    def finish(self) -> None:
        """Nothing is left to show."""

    def arrive(self, name: str, count: int) -> None:
        from mini_engine.kv.block_table import BlockTable

        if name in self.tables:
            raise UserError(f"request {name} has a table already; free it first")
        self.tables[name] = BlockTable(self.allocator)
        self.append(name, count, f"{name} arrives.")

    def append(self, name: str, count: int, begins: str) -> None:
        table = self.tables[name]
        before, first = len(table.blocks), table.num_tokens
        try:
            table.append(count)
        except OutOfBlocks as error:
            said = f"{begins} append({count}) raises OutOfBlocks: {error}. Its table is as it was."
            self.show(said, code=f"{TABLE}.append")
            return
        wrote = [block * self.size + offset for block, offset in map(table.lookup, range(first, first + count))]
        for position, slot in enumerate(wrote, first):
            self.slots[slot] = f"{name}{position}"
        new = table.blocks[before:]
        took = f"takes {plural(len(new), 'block')}: {listed(new)}" if new else "takes no block: the last one has room"
        self.show(f"{begins} append({count}) {took}.", wrote, code=f"{TABLE}.append")

    def cut(self, name: str, length: int) -> None:
        table = self.tables.get(name)
        if table is None:
            return
        before, code = list(table.blocks), f"{TABLE}.truncate"
        try:
            table.truncate(length)
        except ValueError as error:
            self.show(f"{name}: truncate({length}) is refused: {error}.", code=code)
            return
        gone = before[len(table.blocks) :]
        freed = f"frees {plural(len(gone), 'block')}: {listed(gone)}" if gone else "frees no block"
        self.show(
            f"{name}: truncate({length}) {freed}. The old KV stays in its slots until it is overwritten.", code=code
        )

    def leave(self, name: str) -> None:
        table = self.tables.pop(name, None)
        if table is None:
            return
        blocks = list(table.blocks)
        table.free()
        said = f"{name} has ended: {f'blocks {listed(blocks)} are' if blocks else 'no block is'} freed."
        self.show(said, code=f"{TABLE}.free")

    def show(self, say: str, wrote=(), *, code: str) -> None:
        from mini_engine.kv.block_table import fragmentation_ratio, waste_ratio

        tables = list(self.tables.values())
        shown = [{"name": name, "blocks": list(t.blocks), "tokens": t.num_tokens} for name, t in self.tables.items()]
        counters = {
            "tables": len(tables),
            "blocks free": self.allocator.num_free,
            "waste ratio": percent(waste_ratio(tables)),
            "fragmentation ratio": percent(fragmentation_ratio(tables)),
        }
        self.tape.frame(say, code=code, tables=shown, free=list(self.allocator.free_blocks), slots=list(self.slots),
                        wrote=list(wrote), view="blocks", plan=None, walk=None, counters=counters)  # fmt: skip


LAB = Lab(
    name="table",
    title="Your own block tables",
    kind="tables",
    prompt="words",
    example="Once upon a time",
    verbs={"+": "Arrive", ".": "Decode a token each", "!": "Cut to", "-": "Free"},
    knobs=(Knob("blocks", "blocks, with the null block", 8, 2, 16), Knob("size", "block size", 4, 1, 8)),
    presets=(
        Preset("Which block does the next token need?", "+A=The capital of France;+B=Once upon a time there;.;.", {}),
        Preset("What does a table free when it is cut?",
               "+A=one two three four five six seven eight nine;!A=5;!A=4;!A=0;!A=1", {}),
        Preset("What is left of an append that fails?",
               "+A=one two three four;+B=one two three four five six;.;.", {"blocks": 4}),
    ),
    modules=("mini_engine/kv/block_table.py",),
    world=Tables,
    lesson="l3_block_tensor",
    rules=table_rules,
    code=(ALLOCATOR, f"{TABLE}.append", f"{TABLE}.truncate", f"{TABLE}.free"),
)  # fmt: skip
