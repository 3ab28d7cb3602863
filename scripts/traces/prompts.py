"""Course machinery. Lesson 8's second trace: one edge is split, its parts are locked, unlocked and evicted."""

from collections.abc import Sequence
from typing import Any

from scripts.traces.sharing import MANAGER, SPLIT, TREE, below, letters_of, watch_evictions
from scripts.traces.tape import Tape, ask, listed, plural

from mini_engine.kv.cache_coordinator import cache_of, caching_manager

BLOCK_SIZE, NUM_BLOCKS = 4, 8
PROMPTS = {
    "A": "SSSSSSSSaaaaa",
    "B": "SSSSSSSSbbbbbbbbb",
    "C": "cccccc",
    "D": "ddddddddddddddddd",
    "E": "SSSSSSSSeee",
}


class Prompts(Tape):
    """Runs prompts through lesson 8's manager; a letter is a token."""

    def __init__(self) -> None:
        scene = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS}
        super().__init__("l8-prompts", "l8_radix/two_prompts.trace.js", "prompts", "Split, lock, evict", 3, **scene)
        self.manager: Any = caching_manager(NUM_BLOCKS, BLOCK_SIZE)
        self.tree = cache_of(self.manager).prefixes.tree
        self.evicted: list[int] = []
        watch_evictions(self.tree, lambda gone: setattr(self, "evicted", gone))

    def nodes(self) -> list[dict[str, Any]]:
        """Return the tree's nodes. by: the requests whose prefix ends at a node or below it, which its locks count."""
        paths = {name: list(table.shared.node.path()) for name, table in self.manager.tables.items()}
        return [
            {
                "blocks": list(node.blocks),
                "texts": letters_of(node, BLOCK_SIZE),
                "locks": node.locks,
                "by": [name for name, path in paths.items() if node in path],
                "parent": parent,
            }
            for node, parent in below(self.tree.root)
        ]

    def blocks(self) -> list[int]:
        """Return the tree's blocks."""
        return [block for node in self.nodes() for block in node["blocks"]]

    def state(self) -> dict[str, Any]:
        """Return the frame's state. cut: the block after which an edge was split. gone: nodes before the eviction."""
        tables = [
            {"name": name, "prompt": PROMPTS[name], "blocks": list(table.blocks)}
            for name, table in self.manager.tables.items()
        ]
        free = list(self.manager.allocator.free_blocks)
        return {"nodes": self.nodes(), "tables": tables, "free": free, "cut": 0, "gone": []}

    def find(self, name: str) -> tuple[int, int]:
        """Start a request's table. Return the tokens found, and the block after which an edge was split, or 0."""
        before = {node["blocks"][0]: node["blocks"] for node in self.nodes()}
        found = self.manager.allocate(name, ids(name))
        cuts = [node["blocks"][-1] for node in self.nodes() if node["blocks"] != before.get(node["blocks"][0])]
        return found, cuts[0] if cuts else 0

    def compute(self, name: str) -> list[int]:
        """Compute a prompt; return the blocks that went into the tree."""
        before = self.blocks()
        self.manager.grow(name, len(PROMPTS[name]))
        self.manager.commit(name, ids(name), len(PROMPTS[name]))
        return [block for block in self.blocks() if block not in before]

    def evict(self, name: str) -> tuple[list[int], list[dict[str, Any]]]:
        """Allocate a request's blocks. Return the blocks evicted for it, in order, and their drawing."""
        self.find(name)
        before, self.evicted = self.nodes(), []
        self.manager.grow(name, len(PROMPTS[name]))
        return self.evicted, lost(before, self.evicted)

    def leave(self, name: str) -> None:
        """End a request whose answer was not fed."""
        self.manager.free(name, ids(name))

    def record(self) -> None:
        """Let two prompts share an edge, then let others need its blocks."""
        self.show(
            f"An empty tree, and {NUM_BLOCKS - 1} free blocks of {BLOCK_SIZE} tokens. A token is a letter; S is the "
            "system prompt.",
            TREE,
        )
        self.first()
        self.split()
        self.unlock()
        self.one_block()
        self.several_blocks()
        self.again()

    def first(self) -> None:
        self.find("A")
        blocks = self.compute("A")
        rest = len(PROMPTS["A"]) % BLOCK_SIZE
        self.show(
            f"A is computed. Its whole blocks, {listed(blocks)}, become an edge that A locks; {plural(rest, 'token')} "
            "fills none.",
            f"{MANAGER}.store",
        )

    def split(self) -> None:
        found, cut = self.find("B")
        upper, uncut = found // BLOCK_SIZE, len(PROMPTS["A"]) // BLOCK_SIZE
        text = f"B begins with the same {found} tokens and then differs. What becomes of A's edge of {uncut} blocks?"
        why = "An edge is split where prompts part, always between two blocks. Nothing is copied or computed."
        wrong = ("it stays whole", "it is stored twice")
        self.show(
            f"B begins alike: {found} tokens are found. The edge is split behind block {cut}; both lock the upper "
            "part.",
            SPLIT,
            ask(text, f"{upper} blocks, then {uncut - upper}", wrong, why),
            cut=cut,
        )
        blocks = self.compute("B")
        self.show(
            f"B is computed. Its own whole blocks, {listed(blocks)}, become an edge below the shared one.",
            f"{TREE}.insert",
        )

    def unlock(self) -> None:
        self.leave("A")
        unlocked = [block for node in self.nodes() if not node["locks"] for block in node["blocks"]]
        wrong = ("all of A's", "none", listed(self.manager.tables["B"].blocks[:2]))
        why = "A lock counts on every node up to the root. The shared part still has B's."
        self.show(
            f"A ends. Block {listed(unlocked)} has no lock left and may be evicted; B still locks the blocks above.",
            f"{TREE}.unlock",
            ask("A ends. Which blocks of the tree can be evicted now?", listed(unlocked), wrong, why),
        )

    def one_block(self) -> None:
        stored = self.blocks()
        evicted, gone = self.evict("C")
        others = [block for block in stored if block not in evicted][:3]
        text = "C needs one block more than are free. Which block is evicted?"
        why = "Locked nodes stay, however long ago they were used."
        self.show(
            f"C needs 2 blocks and 1 is free. The only leaf without a lock gives up block {listed(evicted)}.",
            f"{TREE}.evict",
            ask(text, listed(evicted), others, why),
            gone=gone,
        )
        self.compute("C")
        self.leave("B")
        self.leave("C")
        said = "C is computed; then B and C end. Nothing is locked, so all of it may be evicted."
        self.show(said, f"{MANAGER}.release")

    def several_blocks(self) -> None:
        evicted, gone = self.evict("D")
        text = f"D needs {len(evicted)} blocks more than are free. Which end of the oldest prompt goes first?"
        why = "A prefix is useful without its tail, but never without its head."
        self.show(
            f"D needs 5, {5 - len(evicted)} are free. The oldest leaf goes, end first, then its parent's end: "
            f"{listed(evicted)}.",
            f"{TREE}._cut",
            ask(text, "its end", ("its beginning", "all of it at once"), why),
            gone=gone,
        )
        self.compute("D")
        self.leave("D")
        self.show("D is computed, and ends. Its 4 whole blocks are cached.", f"{MANAGER}.release")

    def again(self) -> None:
        found, cut = self.find("E")
        text = "E begins with the 8 tokens of S. How many of them are found?"
        count = len(PROMPTS["E"])
        self.show(
            f"E begins with the system prompt. Its head is still there: {found} of {count} tokens are found.",
            f"{TREE}.match",
            ask(text, found, (0, 8, 2), "The head of the oldest prompt outlived its tail."),
            cut=cut,
        )


def ids(name: str) -> list[int]:
    return list(map(ord, PROMPTS[name]))


def lost(before: Sequence[dict[str, Any]], gone: Sequence[int]) -> list[dict[str, Any]]:
    """Return the evicted blocks with their texts, in the tree's order, each with the block before it, or 0."""
    last = {node["blocks"][0]: node["blocks"][-1] for node in before}
    return [
        {"block": block, "text": text, "behind": behind}
        for node in before
        for behind, block, text in zip(
            [last.get(node["parent"], 0), *node["blocks"]], node["blocks"], node["texts"], strict=False
        )
        if block in gone
    ]
