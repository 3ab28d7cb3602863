"""Course machinery. For recorders and labs: a tree's nodes, a manager that reports its actions, a pool of letters."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from scripts.traces.tape import Tape, ask, listed, plural

from mini_engine.kv.cache_coordinator import CacheCoordinator, cache_of
from mini_engine.kv.coordinator import CopyBlocks, no_store
from mini_engine.kv.eviction import EvictionPolicy
from mini_engine.kv.manager import KvCacheManager
from mini_engine.kv.prefix_cache import PrefixCache
from mini_engine.kv.radix import RadixTree
from mini_engine.kv.radix_node import Node

TREE = "mini_engine/kv/radix.py::RadixTree"
SPLIT = "mini_engine/kv/radix_node.py::Node.split"
MANAGER = "mini_engine/kv/prefix_cache.py::PrefixCache"


def below(node: Node, parent: int = 0) -> Iterator[tuple[Node, int]]:
    """Yield the nodes below one, parents before children, each with the first block of its parent; 0 for the root."""
    for child in node.children.values():
        yield child, parent
        yield from below(child, child.blocks[0])


def ids_of(node: Node) -> list[int]:
    """Return the tokens of a node's edge."""
    return memoryview(bytes(node.key)).cast("I").tolist()


def letters_of(node: Node, block_size: int) -> list[str]:
    """Return the texts of a node's blocks, where a letter is a token."""
    text = "".join(map(chr, ids_of(node)))
    return [text[i : i + block_size] for i in range(0, len(text), block_size)]


def watch_evictions(tree: RadixTree, tell: Callable[[list[int]], None]) -> None:
    """Call `tell` with the blocks of each eviction, in the order in which they went."""
    evict = tree.evict

    def watched(num_blocks: int) -> list[int]:
        gone = evict(num_blocks)
        tell(gone)
        return gone

    tree.evict = watched


class Letters:
    """A pool whose blocks hold letters: a letter is a token here, and its own K and V."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.blocks, self.payload_bytes = [b""] * num_blocks, block_size

    def read(self, blocks):
        return [self.blocks[block].ljust(self.payload_bytes) for block in blocks]

    def write(self, blocks, payloads) -> None:
        for block, payload in zip(blocks, payloads, strict=True):
            self.blocks[block] = bytes(payload)

    def copy(self, sources, targets) -> None:
        self.write(targets, self.read(sources))


class Telling(KvCacheManager):
    """Lesson 8's manager; each method does its work and then reports to `tape`."""

    def __init__(
        self,
        tape: "Told",
        num_blocks: int,
        block_size: int,
        copy: CopyBlocks = no_store,
        policy: EvictionPolicy | None = None,
    ) -> None:
        super().__init__(
            num_blocks, block_size, copy, partial(CacheCoordinator, prefixes=partial(PrefixCache, policy=policy))
        )
        self.tape, self.tree = tape, cache_of(self).prefixes.tree
        tape.manager = self
        watch_evictions(self.tree, tape.evicted)

    def cost(self, token_ids, *rest, **options):
        cost = super().cost(token_ids, *rest, **options)
        if cost.should_wait:
            self.tape.waits(token_ids)
        return cost

    def allocate(self, request_id, token_ids, *rest, **options):
        nodes = len(list(below(self.tree.root)))
        found = super().allocate(request_id, token_ids, *rest, **options)
        self.tape.asked[request_id] = (len(token_ids), found)
        self.tape.came(request_id, len(token_ids), found, len(list(below(self.tree.root))) > nodes)
        return found

    def grow(self, request_id, num_tokens):
        self.tape.growing = request_id
        return super().grow(request_id, num_tokens)

    def commit(self, request_id, token_ids, num_computed):
        stored = self.tree.num_blocks
        super().commit(request_id, token_ids, num_computed)
        self.tape.stored(request_id, self.tree.num_blocks - stored)

    def free(self, request_id, computed_ids=()):
        is_there, stored, free = request_id in self.tables, self.tree.num_blocks, self.allocator.num_free
        super().free(request_id, computed_ids)
        if is_there:
            self.tape.left(request_id, self.tree.num_blocks - stored, self.allocator.num_free - free)


class Told(Tape):
    """Shows a Telling manager's state after each call: the base of lesson 8's first recorder and of its lab.

    asked: a request's number of tokens, and of tokens found. growing: the last request to get blocks.
    """

    manager: Any  # Telling, whose allocator counts holders

    def __init__(self, *about: Any, **scene: Any) -> None:
        super().__init__(*about, **scene)
        self.growing, self.asked = "", dict[str, tuple[int, int]]()

    def line(self, token_ids: Sequence[int]) -> str:
        """Return tokens as a text on one line."""
        return " ".join(self.tokenizer.decode(token_ids).split())

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"blocks": list(node.blocks), "locks": node.locks, "parent": parent, "text": self.line(ids_of(node))}
            for node, parent in below(self.manager.tree.root)
        ]

    def state(self) -> dict[str, Any]:
        manager = self.manager
        tables = [
            {"name": name, "blocks": list(table.blocks), "tokens": self.asked[name][0], "found": self.asked[name][1]}
            for name, table in manager.tables.items()
        ]
        state = {"nodes": self.nodes(), "tables": tables, "counts": list(manager.allocator.counts)}
        return state | {"sums": manager.blocks_by_state._asdict(), "marked": [], "evicted": []}

    def came(self, name: str, tokens: int, found: int, was_split: bool) -> None:
        """Show that a request was admitted."""
        raise NotImplementedError

    def waits(self, token_ids: Sequence[int]) -> None:
        """Show that a request not yet admitted waits for a prefix that is being computed."""
        raise NotImplementedError

    def evicted(self, gone: list[int]) -> None:
        if not gone:
            return
        say = f"{self.growing} needs a block and none is free."
        why = "The least recently used unlocked leaf gives up blocks from its end. Locked blocks stay."
        question, nodes = None, self.nodes()
        if not any("ask" in frame and frame["evicted"] for frame in self.frames):
            last = [[node["blocks"][-1] for node in nodes if bool(node["locks"]) == locked] for locked in (True, False)]
            wrong = (1, *last[0][-1:], *last[1][-1:])
            question = ask(f"{say} Which cached block is evicted?", listed(gone), wrong, why)
        say += f" The least recently used leaf gives up block {listed(gone)}."
        self.show(say, f"{TREE}.evict", question, evicted=list(gone))

    def stored(self, name: str, count: int) -> None:
        """Show which of a prompt's blocks were stored; an answer's are stored when the request ends."""
        if not count:
            return
        tokens, found = self.asked[name]
        new = list(self.manager.tables[name].blocks[found // self.manager.block_size :][:count])
        goes = "goes" if count == 1 else "go"
        self.show(
            f"{name}'s prefill computes {plural(tokens - found, 'token')}. {plural(count, 'whole block')} {goes} into "
            f"the tree: {listed(new)}.",
            f"{MANAGER}.store",
            marked=new,
        )

    def left(self, name: str, count: int, freed: int) -> None:
        """Show that a request has ended. count: the blocks that the tree has gained."""
        say = f"Its answer's {plural(count, 'block')} stay{'s' if count == 1 else ''} cached, evictable."
        if not count:
            say = f"Its answer is stored already: {plural(freed, 'duplicate')} freed."
        sums, question = self.manager.blocks_by_state, None
        if name == "A":
            why = "They stay until the pool needs them. The scheduler counts them as free."
            text = "A has ended. What happens to the blocks that only A used?"
            question = ask(text, "cached, evictable", ("free at once", "locked forever"), why)
        say = f"{name} has ended. {say} Free {sums.free}, held {sums.held}, cached {sums.cached}."
        self.show(say, f"{MANAGER}.release", question)
