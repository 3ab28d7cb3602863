"""Course machinery. Lesson 3's lab: block tables grow, are cut and are freed; the null block stays."""

from typing import Any, ClassVar

from scripts.live.labs.events import Event, whole_number, words_of
from scripts.live.labs.lab import Knob, Lab, Preset, percent
from scripts.traces.tape import listed, plural

from mini_engine.base.errors import OutOfBlocks, UserError
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.block_table import BlockTable, fragmentation_ratio, waste_ratio

ALLOCATOR = "mini_engine/kv/allocator.py::BlockAllocator"
TABLE = "mini_engine/kv/block_table.py::BlockTable"


class Tables(Lab):
    """One block table for each request."""

    name, kind, lesson = "table", "tables", "l3_block_tensor"
    title = "Your own block tables"
    prompt, example = "words", "Once upon a time"
    verbs: ClassVar = {"+": "Arrive", ".": "Decode a token each", "!": "Cut to", "-": "Free"}
    knobs = (Knob("blocks", "blocks, with the null block", 8, 2, 16), Knob("size", "block size", 4, 1, 8))
    presets = (
        Preset("Which block does the next token need?", "+A=The capital of France;+B=Once upon a time there;.;.", {}),
        Preset("What does a table free when it is cut?",
               "+A=one two three four five six seven eight nine;!A=5;!A=4;!A=0;!A=1", {}),
        Preset("What is left of an append that fails?",
               "+A=one two three four;+B=one two three four five six;.;.", {"blocks": 4}),
    )  # fmt: skip
    modules = ("mini_engine/kv/block_table.py",)
    code = (ALLOCATOR, f"{TABLE}.append", f"{TABLE}.truncate", f"{TABLE}.free")

    def __init__(self, chosen: dict[str, Any]) -> None:
        blocks, self.size = chosen["blocks"], chosen["size"]
        super().__init__(chosen, block_size=self.size, num_blocks=blocks)
        self.allocator = BlockAllocator(blocks, self.size)
        self.tables: dict[str, BlockTable] = {}
        self.slots: list[str | None] = [None] * (blocks * self.size)
        said = f"{blocks} blocks of {self.size} slots. Block 0 is the null block, which is never handed out."
        self.show(said, ALLOCATOR)

    @property
    def alive(self) -> list[str]:
        return list(self.tables)

    def state(self) -> dict[str, Any]:
        tables = list(self.tables.values())
        shown = [{"name": name, "blocks": list(t.blocks), "tokens": t.num_tokens} for name, t in self.tables.items()]
        counters = {
            "tables": len(tables),
            "blocks free": self.allocator.num_free,
            "waste ratio": percent(waste_ratio(tables)),
            "fragmentation ratio": percent(fragmentation_ratio(tables)),
        }
        pool = {"free": list(self.allocator.free_blocks), "slots": list(self.slots), "wrote": []}
        return {"tables": shown, "view": "blocks", "plan": None, "walk": None, "counters": counters} | pool

    def happen(self, event: Event) -> None:
        if event.kind == "!":
            self.cut(event.name, whole_number(event.text, 0, 99, "the length"))
        else:
            super().happen(event)

    def arrive(self, name: str, text: str) -> None:
        if name in self.tables:
            raise UserError(f"request {name} has a table already; free it first")
        self.tables[name] = BlockTable(self.allocator)
        self.append(name, len(words_of(text)), f"{name} arrives.")

    def step(self) -> None:
        for name in list(self.tables):
            self.append(name, 1, f"{name} decodes:")

    def append(self, name: str, count: int, begins: str) -> None:
        table, code = self.tables[name], f"{TABLE}.append"
        before, first = len(table.blocks), table.num_tokens
        try:
            table.append(count)
        except OutOfBlocks as error:
            self.show(f"{begins} append({count}) raises OutOfBlocks: {error}. Its table is as it was.", code)
            return
        wrote = [block * self.size + offset for block, offset in map(table.lookup, range(first, first + count))]
        for position, slot in enumerate(wrote, first):
            self.slots[slot] = f"{name}{position}"
        new = table.blocks[before:]
        took = f"takes {plural(len(new), 'block')}: {listed(new)}" if new else "takes no block: the last one has room"
        self.show(f"{begins} append({count}) {took}.", code, wrote=wrote)

    def cut(self, name: str, length: int) -> None:
        table, code = self.tables.get(name), f"{TABLE}.truncate"
        if table is None:
            return
        before = list(table.blocks)
        try:
            table.truncate(length)
        except ValueError as error:
            self.show(f"{name}: truncate({length}) is refused: {error}.", code)
            return
        gone = before[len(table.blocks) :]
        freed = f"frees {plural(len(gone), 'block')}: {listed(gone)}" if gone else "frees no block"
        self.show(f"{name}: truncate({length}) {freed}. Old KV stays until it is overwritten.", code)

    def leave(self, name: str) -> None:
        table = self.tables.pop(name, None)
        if table is None:
            return
        blocks = list(table.blocks)
        table.free()
        said = f"{name} has ended: {f'blocks {listed(blocks)} are' if blocks else 'no block is'} freed."
        self.show(said, f"{TABLE}.free")
