"""Course machinery. Lesson 8's second trace: one edge is split, its parts are locked, unlocked and evicted."""

from collections.abc import Sequence
from typing import Any

from scripts.traces.tape import Tape, ask, listed, plural

BLOCK_SIZE, NUM_BLOCKS = 4, 8
PROMPTS = {
    "A": "SSSSSSSSaaaaa",
    "B": "SSSSSSSSbbbbbbbbb",
    "C": "cccccc",
    "D": "ddddddddddddddddd",
    "E": "SSSSSSSSeee",
}
TREE = "mini_engine/kv/radix.py::RadixTree"
SPLIT = "mini_engine/kv/radix_node.py::Node.split"
MANAGER = "mini_engine/kv/prefix_cache.py::PrefixCache"


def tape() -> Tape:
    scene = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS}
    return Tape("l8-prompts", "l8_radix/two_prompts.trace.js", "prompts", "Split, lock, evict", scene, 3)


class Story:
    """Runs prompts through lesson 8's manager; a letter is a token."""

    def __init__(self, tape: Tape) -> None:
        from mini_engine.kv.prefix_cache import caching_manager

        self.tape, self.manager = tape, caching_manager(NUM_BLOCKS, BLOCK_SIZE)
        evict = self.manager.prefixes.tree.evict
        self.evicted: list[int] = []

        def watched(num_blocks: int) -> list[int]:
            self.evicted = evict(num_blocks)
            return self.evicted

        self.manager.prefixes.tree.evict = watched

    def nodes(self) -> list[dict[str, Any]]:
        """Return the tree's nodes, parents before children. `parent` is the parent's first block, 0 for the root.

        by: the requests whose prefix ends at the node or below it, which is what its locks count.
        """
        found: list[dict[str, Any]] = []
        paths = {name: list(table.shared.node.path()) for name, table in self.manager.tables.items()}

        def visit(node, parent: int) -> None:
            for child in node.children.values():
                letters = "".join(map(chr, memoryview(bytes(child.key)).cast("I")))
                texts = [letters[i : i + BLOCK_SIZE] for i in range(0, len(letters), BLOCK_SIZE)]
                by = [name for name, path in paths.items() if child in path]
                found.append(
                    {"blocks": list(child.blocks), "texts": texts, "locks": child.locks, "by": by, "parent": parent}
                )
                visit(child, child.blocks[0])

        visit(self.manager.prefixes.tree.root, 0)
        return found

    def show(self, say: str, code: str, question=None, cut: int = 0, gone: Sequence[dict[str, Any]] = ()) -> None:
        """Add a frame. cut: the block behind which an edge was split. gone: nodes as they were before the eviction."""
        tables = [
            {"name": name, "prompt": PROMPTS[name], "blocks": list(table.blocks)}
            for name, table in self.manager.tables.items()
        ]
        free = list(self.manager.allocator.free_blocks)
        self.tape.frame(say, question, code, nodes=self.nodes(), tables=tables, free=free, cut=cut, gone=list(gone))

    def find(self, name: str) -> tuple[int, int]:
        """Begin a request's table. Return the tokens found, and the block behind which an edge was split, or 0."""
        before = {node["blocks"][0]: node["blocks"] for node in self.nodes()}
        found = self.manager.allocate(name, list(map(ord, PROMPTS[name])))
        cuts = [node["blocks"][-1] for node in self.nodes() if node["blocks"] != before.get(node["blocks"][0])][:1]
        return found, cuts[0] if cuts else 0

    def grow(self, name: str) -> list[int]:
        """Allocate the rest of a request's blocks; return the blocks that were evicted for it, in order."""
        self.evicted = []
        self.manager.grow(name, len(PROMPTS[name]))
        return self.evicted

    def compute(self, name: str) -> list[int]:
        """Compute a prompt; return the blocks that went into the tree."""
        before = [b for node in self.nodes() for b in node["blocks"]]
        self.manager.commit(name, list(map(ord, PROMPTS[name])), len(PROMPTS[name]))
        return [b for node in self.nodes() for b in node["blocks"] if b not in before]

    def leave(self, name: str) -> None:
        """End a request whose answer was not fed."""
        self.manager.free(name, list(map(ord, PROMPTS[name])))


def record(tape: Tape) -> None:
    """Let two prompts share an edge, then let others need its blocks."""
    story = Story(tape)
    story.show(
        f"An empty tree, and {NUM_BLOCKS - 1} free blocks of {BLOCK_SIZE} tokens. A token is drawn as a letter; S is "
        "the system prompt.",
        TREE,
    )
    first(story)
    split(story)
    unlock(story)
    evict(story)
    again(story)


def first(story: Story) -> None:
    story.find("A")
    story.grow("A")
    blocks = story.compute("A")
    rest = len(PROMPTS["A"]) % BLOCK_SIZE
    story.show(
        f"Prompt A is computed. Its whole blocks are stored as one edge, {listed(blocks)}, which A locks. "
        f"{plural(rest, 'token')} fills no block and stays outside.",
        f"{MANAGER}.store",
    )


def split(story: Story) -> None:
    found, cut = story.find("B")
    uncut = len(PROMPTS["A"]) // BLOCK_SIZE
    story.show(
        f"B begins alike: {found} tokens are found. The edge is split behind block {cut}, where the prompts part. Both "
        "lock the upper part; only A locks the lower one.",
        SPLIT,
        ask(
            f"B begins with the same {found} tokens and then differs. What becomes of A's edge of {uncut} blocks?",
            f"{found // BLOCK_SIZE} blocks, then {uncut - found // BLOCK_SIZE}",
            ("it stays whole", "it is stored twice"),
            "An edge is split where prompts part, always between two blocks. Nothing is copied or computed.",
        ),
        cut=cut,
    )
    story.grow("B")
    blocks = story.compute("B")
    story.show(
        f"B is computed. Its own whole blocks, {listed(blocks)}, become a second edge below the shared one, and B's.",
        f"{TREE}.insert",
    )


def unlock(story: Story) -> None:
    story.leave("A")
    open_blocks = [b for node in story.nodes() if not node["locks"] for b in node["blocks"]]
    story.show(
        f"A ends and gives up its locks. Block {listed(open_blocks)} has none left: it is cached, and may be evicted. "
        "B still locks the blocks above.",
        f"{TREE}.unlock",
        ask(
            "A ends. Which blocks of the tree can be evicted now?",
            listed(open_blocks),
            ("all of A's", "none", listed(story.manager.tables["B"].blocks[:2])),
            "A lock counts on every node up to the root. The shared part still has B's.",
        ),
    )


def evict(story: Story) -> None:
    before = story.nodes()
    story.find("C")
    gone = story.grow("C")
    story.show(
        f"C needs 2 blocks and 1 is free. The only leaf without a lock gives up block {listed(gone)}.",
        f"{TREE}.evict",
        ask(
            "C needs one block more than are free. Which block is evicted?",
            listed(gone),
            [b for node in before for b in node["blocks"] if b not in gone][:3],
            "Locked nodes stay, however long ago they were used.",
        ),
        gone=lost(before, gone),
    )
    story.compute("C")
    story.leave("B")
    story.leave("C")
    story.show(
        "C is computed; then B and C end. Nothing is locked now, so all that is stored may be evicted.",
        f"{MANAGER}.release",
    )
    before = story.nodes()
    story.find("D")
    gone = story.grow("D")
    story.show(
        f"D needs 5 blocks and {5 - len(gone)} are free. The least recently used leaf gives up its blocks, from its "
        f"end. Then its parent is a leaf, and loses its last block: {listed(gone)} in all.",
        f"{TREE}._cut",
        ask(
            f"D needs {len(gone)} blocks more than are free. Which end of the oldest prompt goes first?",
            "its end",
            ("its beginning", "all of it at once"),
            "A prefix is useful without its tail, but never without its head.",
        ),
        gone=lost(before, gone),
    )
    story.compute("D")
    story.leave("D")
    story.show("D is computed, and ends. Its 4 whole blocks are cached.", f"{MANAGER}.release")


def again(story: Story) -> None:
    found, cut = story.find("E")
    story.show(
        f"E begins with the system prompt. Its head is still there: {found} of {len(PROMPTS['E'])} tokens are found.",
        f"{TREE}.match",
        ask(
            "E begins with the 8 tokens of S. How many of them are found?",
            found,
            (0, 8, 2),
            "The head of the oldest prompt outlived its tail.",
        ),
        cut=cut,
    )


def lost(before: Sequence[dict[str, Any]], gone: Sequence[int]) -> list[dict[str, Any]]:
    """Return the evicted blocks with their texts, in the tree's order, each with the block before it, or 0."""
    found = []
    for node in before:
        for index, (block, text) in enumerate(zip(node["blocks"], node["texts"], strict=True)):
            if block in gone:
                behind = node["blocks"][index - 1] if index else last_of(before, node["parent"])
                found.append({"block": block, "text": text, "behind": behind})
    return found


def last_of(nodes: Sequence[dict[str, Any]], first_block: int) -> int:
    """Return the last block of the node that begins with a block; 0 for the root."""
    return next((node["blocks"][-1] for node in nodes if node["blocks"][0] == first_block), 0)
