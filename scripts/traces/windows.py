"""Course machinery. Lesson 15's trace: a window slides, others take its freed blocks, and a hit needs the last ones."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from scripts.traces.sharing import below, letters_of
from scripts.traces.tape import Tape, ask, listed, plural

from mini_engine.kv.cache_coordinator import cache_of, coordinated
from mini_engine.kv.prefix_cache import PrefixCache
from mini_engine.kv.refcount import RefCountedAllocator
from mini_engine.windows.memory import WindowMemory

BLOCK_SIZE, WINDOW, CHUNK, NUM_BLOCKS = 4, 6, 8, 17
TEXTS = {  # prompt and answer; a letter is a token
    "A": ("The sea is blue ", "and so deep."),
    "B": ("Count up", ""),
    "C": ("The sea is blue and wide.", ""),
    "D": ("The sea is old.", ""),
    "E": ("The sea is wet.", ""),
}
MEMORY = "mini_engine/windows/memory.py::WindowMemory"
KEPT = "mini_engine/windows/kept.py::KeptWindows"
TABLE = "mini_engine/windows/window_table.py::WindowTable"


class Windows(Tape):
    """Runs texts through a manager with lesson 15's memory. One group of layers has a window."""

    def __init__(self) -> None:
        scene = {"block_size": BLOCK_SIZE, "window": WINDOW, "num_blocks": NUM_BLOCKS}
        title = "A window slides, and a prefix is found again"
        super().__init__("l15-windows", "l15_windows/windows.trace.js", "windows", title, 5, **scene)
        allocator = RefCountedAllocator(NUM_BLOCKS, BLOCK_SIZE)
        self.memory = WindowMemory(allocator, WINDOW, 1, CHUNK)
        cache = partial(PrefixCache, memory=self.memory, allocator=allocator)
        self.manager: Any = coordinated(NUM_BLOCKS, BLOCK_SIZE, prefixes=cache)
        self.tree, self.kept = cache_of(self.manager).prefixes.tree, self.memory.kept
        self.done: dict[str, int] = {}

    def state(self) -> dict[str, Any]:
        """Return the frame's state. first: the first visible token. windows: companions, 0 for none. marked: blocks."""
        tables = [
            {
                "name": name,
                "text": "".join(TEXTS[name])[: self.done[name]],
                "full": list(table.blocks),
                "window": list(self.memory.tables_of(name).rows[0]),
                "first": max(0, self.done[name] - WINDOW + 1),
            }
            for name, table in self.manager.tables.items()
        ]
        nodes = [
            {"blocks": list(node.blocks), "texts": letters_of(node, BLOCK_SIZE), "parent": parent}
            | {"windows": [self.kept.companions.get(block, (0,))[0] for block in node.blocks]}
            for node, parent in below(self.tree.root)
        ]
        return {"tables": tables, "nodes": nodes, "free": sorted(self.manager.allocator.free_blocks), "marked": []}

    def record(self) -> None:
        """Run the texts: A and B at the same time, then those that begin like A."""
        self.show(
            f"Two groups of layers share a pool. A token sees all before it in one, {WINDOW} tokens in the other.",
            f"{MEMORY}.__init__",
        )
        self.prefill()
        self.hand_over(self.decode())
        self.end("A", "B")
        self.begin_behind_a_window()
        self.find_a_tombstone()
        self.find_what_was_repaired()

    def prefill(self) -> None:
        """Compute A's prompt in two chunks."""
        self.come("A")
        self.compute("A", CHUNK)
        self.show(
            f"A computes {CHUNK} tokens: a block in each group for every {BLOCK_SIZE}. The tree keeps both, in pairs.",
            f"{TABLE}.grow",
        )
        self.compute("A", 2 * CHUNK)
        held, first = len(self.window("A")), self.visible("A")
        text = f"A has computed {self.done['A']} tokens, {self.done['A'] // BLOCK_SIZE} blocks."
        why = f"The next token, {self.done['A']}, sees tokens {first} to {self.done['A']}: what lies before is a hole."
        self.show(
            f"Token {self.done['A']} will see tokens {first} and on: A keeps {plural(held, 'block')} in the window "
            "group; the rest are holes.",
            f"{MEMORY}.settle",
            ask(f"{text} How many of them does it need in the window group?", held, (1, 3, 4), why),
            marked=self.window("A"),
        )

    def decode(self) -> list[int]:
        """Let A answer. Return the blocks that its window has just left."""
        self.compute("A", 20)
        self.show(
            f"A answers. The full group grows with the text; the window group still holds {len(self.window('A'))} "
            "blocks.",
            f"{TABLE}.slide",
        )
        self.compute("A", 24)
        free = self.free
        self.compute("A", 28)
        left = [block for block in self.free if block not in free]
        self.show(
            f"{self.done['A']} tokens: {len(self.full('A'))} blocks in the full group, {len(self.window('A'))} in the "
            "other. "
            f"Block {listed(left)}, behind it, is free at once.",
            f"{TABLE}.slide",
            marked=left,
        )
        return left

    def hand_over(self, left: list[int]) -> None:
        """Let B take the blocks that A has freed."""
        num_free, kept = len(self.free), dict(self.kept.companions)
        self.come("B")
        self.compute("B", 8)
        taken = self.full("B") + self.window("B")
        (gone,) = [block for block in kept if block not in self.kept.companions]
        text = f"B needs {len(taken)} blocks and {num_free} are free. What goes?"
        why = "It is the only companion behind which no request has begun, or can be expected to."
        wrong = (f"a leaf of the tree, {self.leaves()[0]}", "a block of A")
        self.show(
            f"B computes 8 tokens and takes A's block {listed(left)}. Block {gone} has lost its companion: a "
            "tombstone now.",
            f"{KEPT}.trim",
            ask(text, f"the companion of block {gone}", wrong, why),
            marked=[*left, gone],
        )

    def begin_behind_a_window(self) -> None:
        """Find A's beginning again, at a point where a request can resume."""
        stored, found = self.come("C")
        text = f"C begins like A: “{TEXTS['C'][0]}” The full group has its first {stored} tokens."
        needed = self.window("C")
        why = (
            f"Behind {stored} tokens a companion is missing, because A's window slid on. Behind {found} all are there."
        )
        self.show(
            f"C shares {stored} tokens with A, but begins behind {found}, where the last {WINDOW - 1} have "
            f"companions, {listed(needed)}.",
            f"{KEPT}.num_usable",
            ask(f"{text} How many need not be computed?", found, (0, 8, stored), why),
            marked=[*self.full("C"), *needed],
        )
        self.compute("C", 25)
        self.show(
            f"C computes the other {25 - found}. Leaves go for its blocks; new companions come where A's had gone.",
            f"{MEMORY}.settle",
        )
        self.end("C")

    def find_a_tombstone(self) -> None:
        """Find blocks after which no request can resume."""
        stored, found = self.come("D")
        tomb = self.full_path("D")[0]
        text = f"D agrees with A only in its first {stored} tokens. The full group has them."
        why = (
            f"Token {stored} sees tokens {stored - WINDOW + 1} to {stored}, so blocks 0 and 1. Block 0 is a tombstone."
        )
        self.show(
            f"D shares {stored} tokens. But token {stored} sees token {stored - WINDOW + 1}, in the tombstone {tomb}: "
            f"{found} tokens are found.",
            f"{KEPT}.num_usable",
            ask(f"{text} How many need not be computed?", found, (4, stored), why),
            marked=[tomb],
        )
        self.compute("D", 15)
        self.show(
            f"D computes all. Others may part behind {stored} tokens too, so block {tomb}'s new companion is kept "
            "longer.",
            f"{KEPT}.prove",
            marked=[tomb],
        )
        self.end("D")

    def find_what_was_repaired(self) -> None:
        stored, found = self.come("E")
        text = f"E begins like D, and leaves it behind {stored} tokens too."
        self.show(
            f"{text} Now {found} are found.",
            f"{MEMORY}.begin",
            ask(f"{text} How many need not be computed?", found, (0, 4), "D has left companions for both blocks."),
            marked=[*self.full("E"), *self.window("E")],
        )
        stats = cache_of(self.manager).prefixes.stats
        said = f"{stats.found_tokens} of {stats.asked_tokens} prompt tokens were not computed again."
        self.show(said, "mini_engine/kv/radix.py::HitStats.count")

    # ---------------------------------------------------------------- the engine's calls and its state

    def come(self, name: str) -> tuple[int, int]:
        """Admit a request. Return the number of its tokens in the full group, and of those it resumes after."""
        ids = list(map(ord, TEXTS[name][0]))
        stored = self.tree.peek(ids[:-1]).num_tokens
        self.done[name] = self.manager.allocate(name, ids)
        return stored, self.done[name]

    def compute(self, name: str, stop: int) -> None:
        """Compute a request's tokens up to `stop`: its prompt in chunks, its answer one by one."""
        prompt = len(TEXTS[name][0])
        while self.done[name] < stop:
            done = self.done[name]
            self.done[name] = min(stop, prompt, done + CHUNK) if done < prompt else done + 1
            self.manager.grow(name, self.done[name])
            ids = list(map(ord, "".join(TEXTS[name])))
            self.manager.commit(name, ids[: max(prompt, self.done[name])], self.done[name])

    def end(self, *names: str) -> None:
        """End requests and show the blocks that remain."""
        for name in names:
            self.manager.free(name, list(map(ord, "".join(TEXTS[name]))))
            del self.done[name]
        told = {
            1: f"{names[0]} has ended, and leaves its blocks to the tree.",
            2: f"{listed(names)} have ended. The tree keeps their blocks; of A's answer only the last window.",
        }
        self.show(told[len(names)], f"{MEMORY}.free")

    @property
    def free(self) -> list[int]:
        """The pool's free blocks."""
        return list(self.manager.allocator.free_blocks)

    def full(self, name: str) -> list[int]:
        """Return a request's blocks in the full group."""
        return list(self.manager.tables[name].blocks)

    def window(self, name: str) -> list[int]:
        """Return a request's blocks in the window group, without holes."""
        table = self.memory.tables_of(name)
        return list(table.rows[0][table.first :])

    def visible(self, name: str) -> int:
        """Return the first token that the next one sees."""
        return max(0, self.done[name] - WINDOW + 1)

    def leaves(self) -> Sequence[int]:
        """Return the last block of each of the tree's leaves."""
        return [node.blocks[-1] for node, _ in below(self.tree.root) if not node.children]

    def full_path(self, name: str) -> list[int]:
        """Return the tree's blocks of a prompt."""
        ids = list(map(ord, TEXTS[name][0]))
        return self.tree.prefix(ids, None)
