"""Lesson 11. Slots, checkpoints, blocks and tree through random operations: nothing leaks, a hit has its state.

The states are the tokens that they have seen, and so is a block's KV. So a request that starts from the wrong state, or
a checkpoint that is written twice, is noticed at once.
"""

import pytest

from mini_engine.base.errors import OutOfBlocks
from tests.l11.ledger import Hybrid, places
from tests.shared.trees import check_tree
from tests.worlds import World, played

SIZE, USABLE, SLOTS, TRACK, INTERVAL = 4, 20, 4, 5, 8
SPARE = 3  # working slots for guessed tokens


class HybridWorld(World):
    """A manager of requests with states, and what every slot of the KV pool holds."""

    longest, most_drafts = 45, SPARE

    def __init__(self):
        super().__init__(Hybrid(SLOTS + SPARE, TRACK, USABLE + 1, SIZE, INTERVAL, self.copy, SPARE), SIZE)
        self.states, self.slots = self.kv.states, {}

    def copy(self, sources, targets):
        read = [[self.slots.get(block * SIZE + i) for i in range(SIZE)] for block in sources]
        for block, values in zip(targets, read, strict=True):
            self.slots.update((block * SIZE + i, value) for i, value in enumerate(values))

    def may_begin(self, tokens, namespace, cost, chance):
        if len(self.alive) >= SLOTS:
            assert cost.should_wait, "without a free state slot a request has to wait; some are kept for guesses"
            with pytest.raises(OutOfBlocks):
                self.kv.allocate("none", tokens, namespace)
            return False
        self.did["waits"] += cost.should_wait
        waits = cost.should_wait and chance.random() < 0.7
        return not waits and cost.num_blocks <= self.kv.num_free_blocks

    def check_begin(self, name, found):
        seen = self.states.seen[self.kv.slot_of(name)]
        assert seen == tuple(self.alive[name][:found]), f"a hit of {found} tokens comes with the state of {len(seen)}"

    def chunk(self, name, start, stop, chance):
        return self.kv.chunk_end(name, start, min(stop, start + chance.choice([1, 3, 8, 40])))

    def write(self, name, tokens, start, stop, state_slot=None):
        blocks = self.kv.tables[name].blocks
        self.states.advance(state_slot or self.kv.slot_of(name), tokens[start:stop])
        for position in range(start, stop):
            block = blocks[position // SIZE]
            assert self.kv.allocator.counts[block] == 1, f"{name} writes into block {block}, which others hold as well"
            self.slots[block * SIZE + position % SIZE] = tuple(tokens[: position + 1])

    def write_drafts(self, name, tokens, start, count):
        """Leave the state behind each token in a slot of its own."""
        slots = list(self.kv.memory.slots_of(name))
        assert len(slots) == 1 + count, "before a step with drafts, the states of all earlier ones are free again"
        for index, slot in enumerate(slots):
            if index:
                self.states.copy_states(slots[index - 1], slot)
            self.write(name, tokens, start + index, start + index + 1, slot)

    def drop(self, name, computed=True):
        slot = self.kv.slot_of(name)
        super().drop(name, computed)
        assert self.states.seen[slot] == (), "a slot is zeroed when its request ends or is preempted"

    def check_counts(self):
        super().check_counts()
        kv, states = self.kv, self.states
        working = {slot for name in self.alive for slot in kv.memory.slots_of(name)}
        assert len(working) == len(self.alive), "two requests share a state slot, or one has kept those of its guesses"
        assert sorted([*working, *kv.free_slots]) == list(range(1, SLOTS + SPARE + 1)), "state slots leaked"
        held = sorted(kv.checkpoints.slots.values())
        assert held == sorted(states.held_track_slots), "a checkpoint slot leaked, or two nodes have the same"
        assert len(held) + len(states.free_track_slots) == TRACK

    def check(self):
        self.check_counts()
        check_tree(self.kv.tree)
        for tokens, slot in places(self.kv).items():
            assert self.states.seen[slot] == tokens, "a checkpoint is not the state at its node's end"
        for name, tokens in self.alive.items():
            blocks, done = self.kv.tables[name].blocks, self.kv.hold(name).num_computed
            seen = self.states.seen[self.kv.slot_of(name)]
            assert seen == tuple(tokens[:done]), f"{name} has another request's state"
            for position in range(done):
                slot = blocks[position // SIZE] * SIZE + position % SIZE
                assert self.slots[slot] == tuple(tokens[: position + 1]), f"{name} reads what it never computed"

    def finish(self):
        super().finish()
        assert len(self.states.free_track_slots) == TRACK, "checkpoints leaked"
        self.did["evicted"] += self.kv.checkpoints.num_evicted


def test_random_operations_lose_nothing_and_every_hit_has_its_state():
    did = played(HybridWorld, 8, 20)
    assert did["calls"] >= 500 and did["found"] > 100 and did["taken_back"] > 10


@pytest.mark.nightly
def test_100_000_random_operations():
    did = played(HybridWorld, 60, 150)
    assert did["calls"] >= 100_000 and did["found"] > 10_000 and did["evicted"] > 1000
    assert min(did["waits"], did["preempted"], did["taken_back"]) > 100
