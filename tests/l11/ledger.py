"""Lesson 11. Shared by the tests: a pool whose states are the tokens they have seen, and nodes with names."""

from functools import partial

from mini_engine.hybrid.checkpoints import Checkpoints
from mini_engine.hybrid.memory import StateHold, StateMemory
from mini_engine.hybrid.track_slots import TrackSlots
from mini_engine.kv.cache_coordinator import coordinated
from mini_engine.kv.manager import no_store
from mini_engine.kv.prefix_cache import PrefixCache
from mini_engine.kv.radix import RadixTree
from mini_engine.kv.radix_node import key_of

EMPTY = ()


class Ledger(TrackSlots):
    """A state pool without tensors: the state of a slot is the tuple of tokens that it has seen.

    Attributes:
        seen: slot -> tokens; a slot that was never written has none.
        log: what was asked for, such as ("copy", 1, 4) and ("reset", 1).
        checkpoints: whose they are, if anyone keeps some.
    """

    checkpoints: Checkpoints | None = None

    def __init__(self, max_reqs, max_track_slots=0):
        super().__init__(max_reqs, max_track_slots)
        self.seen = {}
        self.log = []
        self.written = {}  # checkpoint slot -> the node that owned it when it was written, since it was handed out

    def alloc_track_slot(self):
        slot = super().alloc_track_slot()
        self.written.pop(slot, None)
        return slot

    def free_track_slot(self, slot):
        super().free_track_slot(slot)
        self.seen.pop(slot, None)

    def reset_states(self, slots):
        for slot in slots:
            self.check_writable(slot)
            self.seen[slot] = EMPTY
            self.log.append(("reset", slot))

    def copy_states(self, src_index, dst_index):
        self.check_writable(dst_index)
        self.seen[dst_index] = self.seen[src_index]
        self.log.append(("copy", src_index, dst_index))

    def check_writable(self, slot):
        assert 0 < slot < self.num_slots, f"slot {slot} is not in the pool, or it is the padding slot"
        if slot > self.max_reqs:
            assert slot in self.held_track_slots, f"checkpoint {slot} is written but not handed out"
            owner = self.owner(slot)
            is_new = slot not in self.written or self.written[slot] is not owner  # another node may take a slot over
            assert is_new, f"checkpoint {slot} is written again: a checkpoint never changes"
            self.written[slot] = owner

    def owner(self, slot):
        """Return the node whose checkpoint is in `slot`."""
        owners = self.checkpoints.slots.items() if self.checkpoints else ()
        return next((node for node, held in owners if held == slot), None)

    def advance(self, slot, tokens):
        """Do to a working slot what the model does: its state now has seen these tokens too."""
        assert 0 < slot <= self.max_reqs, f"a request writes into slot {slot}, which is not a working slot"
        self.seen[slot] = (*self.seen[slot], *tokens)


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
