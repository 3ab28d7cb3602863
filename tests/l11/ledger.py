"""Lesson 11. Shared by the tests: a manager over a pool whose states are the tokens that they have seen."""

from functools import partial

from mini_engine.hybrid.memory import StateHold, StateMemory
from mini_engine.kv.cache_coordinator import coordinated
from mini_engine.kv.manager import no_store
from mini_engine.kv.prefix_cache import PrefixCache
from mini_engine.kv.radix import RadixTree
from mini_engine.kv.radix_node import key_of
from tests.worlds import Ledger


class Hybrid:
    """Lesson 5's manager with lesson 8's prefix cache and this lesson's memory, over a Ledger.

    Other attributes are the manager's.
    """

    def __init__(self, slots=3, track=4, num_blocks=40, size=4, interval=8, copy=no_store, num_spare=0):
        self.states = Ledger(slots, track)
        self.memory = StateMemory(self.states, size, interval, num_spare)
        self.checkpoints = self.states.checkpoints = self.memory.checkpoints
        cache = partial(PrefixCache, capacity=None if track else 0, memory=self.memory)
        self.manager = coordinated(num_blocks, size, copy, prefixes=cache)

    def __getattr__(self, name):
        return getattr(self.manager, name)

    @property
    def tree(self) -> RadixTree:
        return self.manager.coordinator.prefixes.tree

    @property
    def free_slots(self) -> list[int]:
        return self.memory.free_slots

    def chunk_end(self, name, start, stop) -> int:
        return self.memory.chunk_end(name, start, stop)

    def hold(self, name) -> StateHold:
        return self.memory.holds[name]

    def slot_of(self, name) -> int:
        return self.hold(name).slots[0]

    def findable(self, tokens) -> int:
        """Return how many leading tokens have K, V and a state at their end."""
        return self.memory.last(self.tree, key_of(tokens), None)


manager = Hybrid  # blocks of 4 tokens, a checkpoint every 8


def admit(kv, name, tokens, namespace=None) -> int:
    """Admit a request; return how many of its tokens were found."""
    return kv.allocate(name, tokens, namespace)


def compute(kv, name, tokens, most=1000) -> list[int]:
    """Run a request's chunks to the end of `tokens`, at most `most` tokens each; return where they ended."""
    ends, hold = [], kv.hold(name)
    while hold.num_computed < len(tokens):
        start = hold.num_computed
        stop = kv.chunk_end(name, start, min(len(tokens), start + most))
        kv.grow(name, stop)
        kv.states.advance(hold.slots[0], tokens[start:stop])
        kv.commit(name, tokens, stop)
        ends.append(stop)
    return ends


def serve(kv, name, tokens, namespace=None, most=1000) -> int:
    """Admit, compute and end a request; return how many of its tokens were found."""
    found = admit(kv, name, tokens, namespace)
    compute(kv, name, tokens, most)
    kv.free(name, tokens)
    return found


def places(kv) -> dict[tuple[int, ...], int]:
    """Return the tokens up to each checkpoint, and its slot."""
    found = {}
    for node, slot in kv.checkpoints.slots.items():
        key = b"".join(bytes(part.key) for part in reversed(list(node.path())))
        found[tuple(memoryview(key).cast("I"))] = slot
    return found
