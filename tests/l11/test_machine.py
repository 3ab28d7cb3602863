"""Lesson 11. Slots, checkpoints, blocks and tree through random operations: nothing leaks, a hit has its state.

The states are the tokens that they have seen, and so is a block's KV. So a request that starts from the wrong state, or
a checkpoint that is written twice, is noticed at once.
"""

import random

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from mini_engine.base.errors import OutOfBlocks
from tests.l8.trees import check_tree
from tests.l11.ledger import Hybrid, places

SIZE, USABLE, SLOTS, TRACK, INTERVAL = 4, 20, 4, 5, 8
SPARE = 3  # working slots for guessed tokens
FAMILIES = [random.Random(seed).choices(range(3), k=60) for seed in range(3)]


class World:
    """A manager, its requests' tokens, and what every slot of the KV pool holds. `calls` counts operations."""

    def __init__(self):
        self.kv = Hybrid(SLOTS + SPARE, TRACK, USABLE + 1, SIZE, INTERVAL, self.copy, SPARE)
        self.states = self.kv.states
        self.slots, self.alive = {}, {}
        self.calls = self.names = self.found = self.waits = self.preempted = self.taken_back = 0

    def copy(self, sources, targets):
        read = [[self.slots.get(block * SIZE + i) for i in range(SIZE)] for block in sources]
        for block, values in zip(targets, read, strict=True):
            self.slots.update((block * SIZE + i, value) for i, value in enumerate(values))

    def prompt(self, chance):
        length = chance.randrange(1, 45)
        return FAMILIES[chance.randrange(3)][:length] + chance.choices(range(3), k=chance.randrange(5))

    def admit(self, chance):
        tokens, namespace = self.prompt(chance), chance.choice([0, 0, 0, 1])
        self.calls += 1
        cost = self.kv.cost(tokens, len(tokens), namespace)
        if len(self.alive) >= SLOTS:
            assert cost.should_wait, "without a free state slot a request has to wait; some are kept for guesses"
            with pytest.raises(OutOfBlocks):
                self.kv.allocate("none", tokens, namespace)
            return
        if cost.num_blocks > self.kv.num_free_blocks:
            return
        if cost.should_wait and chance.random() < 0.7:
            self.waits += 1
            return
        self.names += 1
        name, free = f"r{self.names}", self.kv.num_free_blocks
        found = self.kv.allocate(name, tokens, namespace)
        assert found < len(tokens) and found % SIZE == 0
        seen = self.states.seen[self.kv.slot_of(name)]
        assert seen == tuple(tokens[:found]), f"a hit of {found} tokens comes with the state of {len(seen)}"
        taken = free - self.kv.num_free_blocks + self.kv.missing_blocks(name, len(tokens))
        assert taken == cost.num_blocks, "an admission must take exactly what `cost` returned"
        self.found += found
        self.alive[name] = (tokens, namespace)

    def step(self, chance):
        """Compute a chunk of some requests, then commit, preempt, abort or end each of them."""
        flying = []
        for name in list(self.alive):
            tokens, _ = self.alive[name]
            start = self.kv.hold(name).num_computed
            if start == len(tokens):
                tokens.append(chance.randrange(3))
            stop = min(len(tokens), start + chance.choice([1, 3, 8, 40]))
            stop = self.kv.chunk_end(name, start, stop)
            assert stop > start
            self.calls += 1
            if -(-stop // SIZE) > USABLE or self.kv.missing_blocks(name, stop) > self.kv.num_free_blocks:
                self.drop(name, computed=True)
                self.preempted += 1
                continue
            self.kv.grow(name, stop)
            flying.append((name, start, stop))
        for name, start, stop in flying:
            tokens = self.alive[name][0]
            self.write(name, tokens, start, stop)
        for name, _, stop in flying:
            dice = chance.random()
            if dice < 0.05:
                self.drop(name, computed=dice < 0.03)
                continue
            self.kv.commit(name, self.alive[name][0], stop)
            if dice < 0.25:
                self.drop(name, computed=True)

    def write(self, name, tokens, start, stop, state_slot=None):
        blocks = self.kv.tables[name].blocks
        self.states.advance(state_slot or self.kv.slot_of(name), tokens[start:stop])
        for position in range(start, stop):
            block = blocks[position // SIZE]
            assert self.kv.allocator.counts[block] == 1, f"{name} writes into block {block}, which others hold as well"
            self.slots[block * SIZE + position % SIZE] = tuple(tokens[: position + 1])

    def drop(self, name, computed):
        tokens, _ = self.alive.pop(name)
        slot = self.kv.slot_of(name)
        self.kv.free(name, tokens[: self.kv.hold(name).num_computed] if computed else ())
        assert self.states.seen[slot] == (), "a slot is zeroed when its request ends or is preempted"
        self.calls += 1

    def guess(self, chance):
        """Feed a request's newest token with guesses behind it, one state for each; some of them stand."""
        if not self.alive:
            return
        name = chance.choice(sorted(self.alive))
        tokens, _ = self.alive[name]
        start, count = self.kv.hold(name).num_computed, chance.randrange(1, SPARE + 1)
        stop = start + 1 + count
        if start != len(tokens) - 1 or -(-stop // SIZE) > USABLE:
            return
        if self.kv.missing_blocks(name, stop) > self.kv.num_free_blocks:
            return
        self.calls += 1
        drafts = chance.choices(range(3), k=count)
        self.kv.grow(name, stop)
        self.kv.coordinator.announce_truncation(name, count)
        own, *others = self.kv.memory.slots_of(name)
        self.write(name, [*tokens, *drafts], start, start + 1)
        for index, (before, slot) in enumerate(zip([own, *others], others, strict=False)):
            self.states.copy_states(before, slot)
            self.write(name, [*tokens, *drafts], start + 1 + index, start + 2 + index, slot)
        standing = chance.randrange(count + 1)
        tokens += [*drafts[:standing], chance.randrange(3)]
        is_first = chance.random() < 0.5  # what does not stand may be cut off before or after the rest is committed
        if is_first:
            self.kv.truncate(name, start + 1 + standing)
        for stop in range(start + 1, start + 2 + standing):
            self.kv.commit(name, tokens, stop)
        if not is_first:
            self.kv.truncate(name, stop)
        self.taken_back += count - standing
        assert len(self.kv.memory.slots_of(name)) == 1, "the states of wrong guesses are free again"

    def roll_back(self, chance):
        if not self.alive:
            return
        name = chance.choice(sorted(self.alive))
        done = self.kv.hold(name).num_computed
        if done:
            with pytest.raises(ValueError):
                self.kv.truncate(name, chance.randrange(done))
        self.calls += 1

    def evict(self, chance):
        self.kv.tree.evict(chance.randrange(1, 6))
        self.calls += 1

    def some(self, seed, calls):
        chance, until = random.Random(seed), self.calls + calls
        while self.calls < until:
            dice = chance.random()
            actions = (
                (0.35, self.admit), (0.7, self.step), (0.92, self.guess), (0.96, self.roll_back),
                (1, self.evict),
            )  # fmt: skip
            next(action for limit, action in actions if dice < limit)(chance)
            self.check_counts()

    def check_counts(self):
        kv, states = self.kv, self.states
        working = {kv.slot_of(name) for name in self.alive}
        assert len(working) == len(self.alive), "two requests share a state slot"
        assert working | set(kv.free_slots) == set(range(1, SLOTS + SPARE + 1)) and not working & set(kv.free_slots)
        held = sorted(kv.checkpoints.slots.values())
        assert held == sorted(states.held_track_slots), "a checkpoint slot leaked, or two nodes have the same"
        assert len(held) + len(states.free_track_slots) == TRACK
        assert sum(kv.blocks_by_state) == USABLE and min(kv.blocks_by_state) >= 0

    def check(self):
        """Check everything, by walking all of it."""
        self.check_counts()
        check_tree(self.kv.tree)
        for tokens, slot in places(self.kv).items():
            assert self.states.seen[slot] == tokens, "a checkpoint is not the state at its node's end"
        for name, (tokens, _) in self.alive.items():
            table = self.kv.tables[name]
            done = self.kv.hold(name).num_computed
            assert self.states.seen[self.kv.slot_of(name)] == tuple(tokens[:done]), (
                f"{name} has another request's state"
            )
            for position in range(done):
                slot = table.blocks[position // SIZE] * SIZE + position % SIZE
                assert self.slots[slot] == tuple(tokens[: position + 1]), f"{name} reads what it never computed"

    def finish(self):
        for name in list(self.alive):
            self.drop(name, computed=True)
        self.check()
        self.kv.coordinator.clear()
        assert self.kv.allocator.num_free == USABLE, "blocks leaked"
        assert len(self.states.free_track_slots) == TRACK, "checkpoints leaked"
        assert sorted(self.kv.free_slots) == list(range(1, SLOTS + SPARE + 1)), "state slots leaked"


class HybridMachine(RuleBasedStateMachine):
    """Hypothesis chooses what happens. One rule may run hundreds of operations."""

    calls_at_once = 20

    def __init__(self):
        super().__init__()
        self.world = World()

    @rule(seed=st.integers(0, 2**32))
    def many(self, seed):
        self.world.some(seed, self.calls_at_once)

    @rule(seed=st.integers(0, 2**32), action=st.sampled_from(["admit", "step", "guess", "roll_back", "evict"]))
    def one(self, seed, action):
        getattr(self.world, action)(random.Random(seed))

    @invariant()
    def nothing_is_lost(self):
        self.world.check()

    def teardown(self):
        self.world.finish()


def run_machine(examples, calls_at_once):
    """Run the machine; return its worlds."""
    worlds = []

    class Machine(HybridMachine):
        def teardown(self):
            super().teardown()
            worlds.append(self.world)

    Machine.calls_at_once = calls_at_once
    plan = settings(max_examples=examples, stateful_step_count=30, deadline=None, phases=[Phase.generate])
    run_state_machine_as_test(Machine, settings=plan)
    return worlds


def test_random_operations_lose_nothing_and_every_hit_has_its_state():
    worlds = run_machine(8, 20)
    assert sum(world.calls for world in worlds) >= 500
    assert sum(world.found for world in worlds) > 100 and sum(world.taken_back for world in worlds) > 10


@pytest.mark.nightly
def test_100_000_random_operations():
    worlds = run_machine(60, 150)
    assert sum(world.calls for world in worlds) >= 100_000
    assert sum(world.found for world in worlds) > 10_000 and sum(world.waits for world in worlds) > 100
    assert sum(world.preempted for world in worlds) > 100 and sum(world.taken_back for world in worlds) > 100
    assert sum(world.kv.checkpoints.num_evicted for world in worlds) > 1000
