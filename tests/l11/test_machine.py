"""Lesson 11. Slots, checkpoints, blocks and tree through random operations: nothing leaks, a hit has its state.

The states are the tokens that they have seen, and so is a block's KV. So a request that starts from the wrong state, or
a checkpoint that is written twice, is noticed at once.
"""

import random

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from mini_engine.errors import OutOfBlocks
from mini_engine.hybrid.manager import HybridCacheManager
from tests.l8.trees import check_tree
from tests.l11.ledger import Ledger, places

SIZE, USABLE, SLOTS, TRACK, INTERVAL = 4, 20, 4, 5, 8
FAMILIES = [random.Random(seed).choices(range(3), k=60) for seed in range(3)]


class World:
    """A manager, its requests' tokens, and what every slot of the KV pool holds. `calls` counts operations."""

    def __init__(self):
        self.states = Ledger(SLOTS, TRACK)
        self.kv = HybridCacheManager(USABLE + 1, SIZE, self.copy, states=self.states, checkpoint_interval=INTERVAL)
        self.states.tree = self.kv.tree
        self.slots, self.alive = {}, {}
        self.calls = self.names = self.found = self.waits = self.preempted = 0

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
        if not self.kv.free_slots:
            assert cost.should_wait, "without a free state slot a request has to wait"
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
            table = self.kv.tables[name]
            if table.num_computed == len(tokens):
                tokens.append(chance.randrange(3))
            stop = min(len(tokens), table.num_computed + chance.choice([1, 3, 8, 40]))
            stop = self.kv.chunk_end(name, table.num_computed, stop)
            assert stop > table.num_computed
            self.calls += 1
            if -(-stop // SIZE) > USABLE or self.kv.missing_blocks(name, stop) > self.kv.num_free_blocks:
                self.drop(name, computed=True)
                self.preempted += 1
                continue
            self.kv.grow(name, stop)
            flying.append((name, table.num_computed, stop))
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

    def write(self, name, tokens, start, stop):
        blocks = self.kv.tables[name].blocks
        self.states.advance(self.kv.slot_of(name), tokens[start:stop])
        for position in range(start, stop):
            block = blocks[position // SIZE]
            assert self.kv.allocator.counts[block] == 1, f"{name} writes into block {block}, which others hold as well"
            self.slots[block * SIZE + position % SIZE] = tuple(tokens[: position + 1])

    def drop(self, name, computed):
        tokens, _ = self.alive.pop(name)
        slot = self.kv.slot_of(name)
        self.kv.free(name, tokens[: self.kv.tables[name].num_computed] if computed else ())
        assert self.states.seen[slot] == (), "a slot is zeroed when its request ends or is preempted"
        self.calls += 1

    def fork(self, chance):
        if not self.alive or not self.kv.free_slots:
            return
        parent = chance.choice(sorted(self.alive))
        self.names += 1
        child = f"r{self.names}"
        self.kv.fork(parent, child)
        tokens, namespace = self.alive[parent]
        self.alive[child] = ([*tokens[: self.kv.tables[parent].num_computed], chance.randrange(3)], namespace)
        self.calls += 1

    def roll_back(self, chance):
        if not self.alive:
            return
        name = chance.choice(sorted(self.alive))
        done = self.kv.tables[name].num_computed
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
            actions = ((0.4, self.admit), (0.86, self.step), (0.92, self.fork), (0.96, self.roll_back), (1, self.evict))
            next(action for limit, action in actions if dice < limit)(chance)
            self.check_counts()

    def check_counts(self):
        kv, states = self.kv, self.states
        working = {kv.slot_of(name) for name in self.alive}
        assert len(working) == len(self.alive), "two requests share a state slot"
        assert working | set(kv.free_slots) == set(range(1, SLOTS + 1)) and not working & set(kv.free_slots)
        held = sorted(kv.tree.checkpoints.values())
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
            done = table.num_computed
            assert self.states.seen[table.slot] == tuple(tokens[:done]), f"{name} has another request's state"
            for position in range(done):
                slot = table.blocks[position // SIZE] * SIZE + position % SIZE
                assert self.slots[slot] == tuple(tokens[: position + 1]), f"{name} reads what it never computed"

    def finish(self):
        for name in list(self.alive):
            self.drop(name, computed=True)
        self.check()
        self.kv.clear()
        assert self.kv.allocator.num_free == USABLE, "blocks leaked"
        assert len(self.states.free_track_slots) == TRACK, "checkpoints leaked"
        assert sorted(self.kv.free_slots) == list(range(1, SLOTS + 1)), "state slots leaked"


class HybridMachine(RuleBasedStateMachine):
    """Hypothesis chooses what happens. One rule may run hundreds of operations."""

    calls_at_once = 20

    def __init__(self):
        super().__init__()
        self.world = World()

    @rule(seed=st.integers(0, 2**32))
    def many(self, seed):
        self.world.some(seed, self.calls_at_once)

    @rule(seed=st.integers(0, 2**32), action=st.sampled_from(["admit", "step", "fork", "roll_back", "evict"]))
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
    assert sum(world.found for world in worlds) > 100


@pytest.mark.slow
def test_100_000_random_operations():
    worlds = run_machine(60, 150)
    assert sum(world.calls for world in worlds) >= 100_000
    assert sum(world.found for world in worlds) > 10_000 and sum(world.waits for world in worlds) > 100
    assert sum(world.preempted for world in worlds) > 100
    assert sum(world.kv.tree.num_states_evicted for world in worlds) > 1000
