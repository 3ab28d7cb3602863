"""Lesson 15. Shared by the tests: a manager with windows, over a pool whose slots hold the tokens themselves."""

from functools import partial

from mini_engine.kv.cache_coordinator import coordinated
from mini_engine.kv.connector import NO_CONNECTOR
from mini_engine.kv.prefix_cache import PrefixCache
from mini_engine.kv.radix import RadixTree
from mini_engine.kv.radix_node import key_of
from mini_engine.kv.refcount import RefCountedAllocator
from mini_engine.kv.request_table import RequestTable
from mini_engine.windows.memory import WindowHold, WindowMemory

NULL = 0


class Windows:
    """Lesson 5's manager with lesson 8's prefix cache and this lesson's memory. Other attributes are the manager's.

    Args:
        connector: makes the manager's connector, given this object; None for none.

    Attributes:
        slots: what each slot holds: its group, and the tokens up to its own.
    """

    def __init__(self, window=6, num_groups=2, num_blocks=60, size=4, max_step=8, caching=True, connector=None):
        self.window, self.size = window, size
        self.allocator = RefCountedAllocator(num_blocks, size)
        self.memory = WindowMemory(self.allocator, window, num_groups, max_step)
        self.slots = {}
        cache = partial(PrefixCache, capacity=None if caching else 0, memory=self.memory, allocator=self.allocator)
        behind = connector(self) if connector else NO_CONNECTOR
        self.manager = coordinated(num_blocks, size, prefixes=cache, connector=behind)

    def __getattr__(self, name):
        return getattr(self.manager, name)

    @property
    def tree(self) -> RadixTree:
        return self.manager.coordinator.prefixes.tree

    @property
    def kept(self):
        return self.memory.kept

    def hold(self, name) -> WindowHold:
        return self.memory.holds[name]

    def rows(self, name) -> list[list[int]]:
        """Return the request's blocks in group 0, then in the window groups."""
        return [self.manager.tables[name].blocks, *map(list, self.hold(name).table.rows)]

    def findable(self, tokens) -> int:
        """Return how many leading tokens a request can begin behind."""
        return self.memory.last(self.tree, key_of(tokens), None)

    def write(self, name, tokens, start, stop):
        """Do what the model does: write K and V of these tokens in every group."""
        for group, row in enumerate(self.rows(name)):
            for position in range(start, stop):
                block = row[position // self.size]
                assert block != NULL, f"{name} writes token {position} of group {group} into a hole"
                assert self.allocator.counts[block] == 1, f"{name} writes into block {block}, which others hold as well"
                self.slots[block, position % self.size] = (group, tuple(tokens[: position + 1]))

    def check_reads(self, name, tokens, start, stop):
        """Check that queries start … stop - 1 find all that they see, in every group."""
        for group, row in enumerate(self.rows(name)):
            first = max(0, start - self.window + 1) if group else 0
            for position in range(first, stop):
                block = row[position // self.size]
                assert block != NULL, f"{name}: token {start} sees token {position}, where group {group} has a hole"
                found = self.slots.get((block, position % self.size))
                assert found == (group, tuple(tokens[: position + 1])), (
                    f"{name} reads token {position} of group {group} in a block that has another text's, or none"
                )

    def held_by_windows(self, name) -> int:
        """Return how many blocks a request holds in one window group."""
        return sum(block != NULL for block in self.rows(name)[1])


def compute(kv, name, tokens, most=8) -> None:
    """Run a request's chunks to the end of `tokens`, at most `most` tokens each."""
    while (start := kv.hold(name).num_computed) < len(tokens):
        stop = min(len(tokens), start + most)
        kv.grow(name, stop)
        kv.write(name, tokens, start, stop)
        kv.check_reads(name, tokens, start, stop)
        kv.commit(name, tokens, stop)


def serve(kv, name, tokens, most=8) -> int:
    """Admit, compute and end a request; return how many of its tokens were found."""
    found = kv.allocate(name, tokens)
    kv.check_reads(name, tokens, found, found)
    compute(kv, name, tokens, most)
    kv.free(name, tokens)
    return found


def remember(kv, tokens) -> list[int]:
    """Put a text into the tree by hand, with a companion for each of its blocks, and return these blocks."""
    blocks = kv.allocator.alloc_blocks(len(tokens) // kv.size)
    kv.tree.insert(tokens, blocks)
    kv.allocator.free(blocks)  # from now on only the tree holds them
    for index, block in enumerate(blocks):
        companion = tuple(kv.allocator.alloc_blocks(kv.memory.num_groups))
        for group, own in enumerate((block, *companion)):
            for position in range(index * kv.size, (index + 1) * kv.size):
                kv.slots[own, position % kv.size] = (group, tuple(tokens[: position + 1]))
        kv.kept.keep(block, companion)
        kv.allocator.free(companion)
        kv.kept.spare[block] = None
    return blocks


def begin(kv, name, blocks, num_tokens, num_known=0) -> RequestTable:
    """Begin a request behind these blocks of the tree, which it is given by hand; return its table in group 0."""
    table = kv.manager.tables[name] = RequestTable(kv.allocator)
    kv.allocator.share(blocks)
    table.adopt(blocks, len(blocks) * kv.size)
    kv.memory.begin(name, num_tokens, table, num_known)
    return table
