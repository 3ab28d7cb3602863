"""Lesson 15. Tables, tree and companions through random operations: nothing leaks, nothing reads a hole, W bounds all.

Each slot of the pool holds its group and the tokens up to its own, so a block that was freed too early, adopted from
the wrong group or found behind the wrong text is noticed by the first query that sees it.
"""

import random
from collections import Counter

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.l8.trees import check_tree
from tests.l15.ledger import NULL, Windows

USABLE = 70
FAMILIES = [random.Random(seed).choices(range(3), k=80) for seed in range(3)]
SHAPES = [(6, 2, 4, 8), (2, 1, 4, 8), (9, 3, 4, 5), (5, 2, 1, 7), (17, 1, 16, 16), (3, 4, 8, 1)]


class World:
    """A manager and its requests' tokens. `calls` counts operations."""

    def __init__(self, window=6, num_groups=2, size=4, max_step=8):
        self.kv = Windows(window, num_groups, USABLE + 1, size, max_step)
        self.window, self.num_groups, self.size, self.max_step = window, num_groups, size, max_step
        self.alive = {}
        self.calls = self.names = self.found = self.preempted = self.taken_back = self.shorter = 0

    def prompt(self, chance):
        length = chance.randrange(1, 60)
        return FAMILIES[chance.randrange(3)][:length] + chance.choices(range(3), k=chance.randrange(5))

    def admit(self, chance):
        tokens, namespace = self.prompt(chance), chance.choice([0, 0, 0, 1])
        self.calls += 1
        cost = self.kv.cost(tokens, len(tokens), namespace)
        promised = sum(self.kv.missing_blocks(name, len(known)) for name, (known, _) in self.alive.items())
        if cost.num_blocks > self.kv.num_free_blocks - promised:
            return
        self.names += 1
        name, free = f"r{self.names}", self.kv.num_free_blocks
        found = self.kv.allocate(name, tokens, namespace)
        assert found < len(tokens) and found % self.size == 0
        self.alive[name] = (tokens, namespace)
        self.kv.check_reads(name, tokens, found, found)
        taken = free - self.kv.num_free_blocks + self.kv.missing_blocks(name, len(tokens))
        assert taken == cost.num_blocks, "an admission must take exactly what `cost` returned"
        self.found += found
        self.shorter += found < self.kv.coordinator.prefixes.num_known(self.kv.tables[name])

    def step(self, chance):
        """Compute a chunk of some requests, then commit, preempt, abort or end each of them."""
        flying = []
        for name in list(self.alive):
            tokens, _ = self.alive[name]
            start = self.kv.hold(name).num_computed
            if start == len(tokens):
                tokens.append(chance.randrange(3))
            stop = min(len(tokens), start + chance.randrange(1, self.max_step + 1))
            self.calls += 1
            promised = sum(self.kv.missing_blocks(one, len(known)) for one, (known, _) in self.alive.items())
            if promised > self.kv.num_free_blocks:
                self.drop(name, computed=True)
                self.preempted += 1
                continue
            self.grow(name, stop)
            flying.append((name, start, stop))
        for name, start, stop in flying:
            tokens = self.alive[name][0]
            self.kv.write(name, tokens, start, stop)
            self.check_bound(name, stop - start)
        for name, start, stop in flying:
            self.kv.check_reads(name, self.alive[name][0], start, stop)
        for name, _, stop in flying:
            dice = chance.random()
            if dice < 0.05:
                self.drop(name, computed=dice < 0.03)
                continue
            promised = self.promised(name)
            self.kv.commit(name, self.alive[name][0], stop)
            assert self.promised(name) <= promised, "a promise never grows: what a step frees is reused by the next one"
            if dice < 0.25:
                self.drop(name, computed=True)

    def grow(self, name, stop):
        """Take blocks for a chunk. What is promised is there, so this raises nothing."""
        tokens, memory = self.alive[name][0], self.kv.memory
        reserved, missing = memory.num_reserved(name, len(tokens)), memory.num_missing(name, stop)
        assert missing <= reserved, f"{missing} blocks are needed for a chunk of a request that was promised {reserved}"
        if len(tokens) - self.kv.hold(name).num_computed <= self.max_step:
            exact = memory.num_missing(name, len(tokens))
            assert reserved == exact, f"the last {self.max_step} tokens are one step, which takes {exact} blocks"
        self.kv.grow(name, stop)

    def promised(self, name):
        """Return the blocks of window groups that a request has or is promised."""
        return self.kv.hold(name).table.num_held + self.kv.memory.num_reserved(name, len(self.alive[name][0]))

    def check_bound(self, name, num_fed):
        most = -(-(self.window - 1) // self.size) + 2 + -(-(num_fed - 1) // self.size)
        held = self.kv.held_by_windows(name)
        assert held <= most, f"{name} holds {held} blocks of a window group while it feeds {num_fed}; {most} are enough"

    def drop(self, name, computed):
        tokens, _ = self.alive.pop(name)
        self.kv.free(name, tokens[: self.kv.hold(name).num_computed] if computed else ())
        self.calls += 1

    def guess(self, chance):
        """Feed a request's newest token with guesses behind it; some of them stand, the others are truncated."""
        if not self.alive or self.max_step < 2:
            return
        name = chance.choice(sorted(self.alive))
        tokens, _ = self.alive[name]
        start, count = self.kv.hold(name).num_computed, chance.randrange(1, min(4, self.max_step))
        if start == len(tokens):
            tokens.append(chance.randrange(3))
        stop = start + 1 + count
        if start != len(tokens) - 1 or self.kv.missing_blocks(name, stop) > self.kv.num_free_blocks:
            return
        self.calls += 1
        drafts = chance.choices(range(3), k=count)
        self.kv.grow(name, start + 1)
        self.kv.grow(name, stop)
        self.kv.coordinator.announce_truncation(name, count)
        self.kv.write(name, [*tokens, *drafts], start, stop)
        self.kv.check_reads(name, [*tokens, *drafts], start, stop)
        standing = chance.randrange(count + 1)
        tokens += [*drafts[:standing], chance.randrange(3)]
        is_first = chance.random() < 0.5
        if is_first:
            self.kv.truncate(name, start + 1 + standing)
        for stop in range(start + 1, start + 2 + standing):
            self.kv.commit(name, tokens, stop)
        if not is_first:
            self.kv.truncate(name, stop)
        self.taken_back += count - standing

    def roll_back(self, chance):
        if not self.alive:
            return
        name = chance.choice(sorted(self.alive))
        if done := self.kv.hold(name).num_computed:
            with pytest.raises(ValueError):
                self.kv.truncate(name, chance.randrange(done))
        self.calls += 1

    def evict(self, chance):
        how = chance.choice([self.kv.tree.evict, self.kv.kept.trim, self.kv.kept.evict])
        how(chance.randrange(1, 6))
        self.calls += 1

    def some(self, seed, calls):
        chance, until = random.Random(seed), self.calls + calls
        while self.calls < until:
            dice = chance.random()
            actions = (
                (0.35, self.admit), (0.7, self.step), (0.9, self.guess), (0.95, self.roll_back),
                (1, self.evict),
            )  # fmt: skip
            next(action for limit, action in actions if dice < limit)(chance)
            assert sum(self.kv.blocks_by_state) == USABLE and min(self.kv.blocks_by_state) >= 0

    def check(self):
        """Check everything, by walking all of it."""
        kv = self.kv
        check_tree(kv.tree)
        holders, in_tree = Counter(), set()
        for name, (tokens, _) in self.alive.items():
            done = kv.hold(name).num_computed
            kv.check_reads(name, tokens, done, done)
            main, *others = kv.rows(name)
            assert all(len(row) == len(main) for row in others), "the groups of a request reach equally far"
            holes = min(max(0, done // self.size * self.size - self.window + 1) // self.size, len(main))
            assert [others[0].count(NULL), any(others[0][:holes])] == [holes, False], (
                f"{name} has computed {done} tokens, so its first {holes} blocks can be seen by no later one"
            )
            for row in (main, *others):
                holders.update(block for block in row if block != NULL)
        nodes = [kv.tree.root]
        for node in nodes:
            nodes += node.children.values()
            in_tree.update(node.blocks)
        assert set(kv.kept.companions) <= in_tree, "a companion of a block that has left the tree"
        holders.update(in_tree)
        for companion in kv.kept.companions.values():
            holders.update(companion)
        counts = {block: count for block, count in enumerate(kv.allocator.counts) if count}
        assert counts == dict(holders), (
            "a block's count is the number of its holders; something leaked or was freed twice"
        )
        alone = [one for one in kv.kept.companions.values() if kv.allocator.counts[one[0]] == 1]
        assert kv.kept.num_evictable == self.num_groups * len(alone), (
            "companions that only the tree holds are evictable"
        )

    def finish(self):
        for name in list(self.alive):
            self.drop(name, computed=True)
        self.check()
        assert self.kv.num_free_blocks == USABLE, "with no request, all blocks can be had"
        self.kv.coordinator.clear()
        assert self.kv.allocator.num_free == USABLE, "blocks leaked"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_thousands_of_operations(shape):
    world = World(*shape)
    for seed in range(20):
        world.some(seed, 60)
        world.check()
    world.finish()
    assert world.found > 200, "no prefix was ever found, so this test has seen nothing"


def test_the_operations_cover_what_they_are_for():
    worlds = [World() for _ in range(4)]
    for seed, world in enumerate(worlds):
        world.some(100 + seed, 800)
        world.finish()
    for what, least in (("found", 500), ("preempted", 5), ("taken_back", 100), ("shorter", 20)):
        assert sum(getattr(world, what) for world in worlds) > least, f"{what} hardly ever happened"


class Machine(RuleBasedStateMachine):
    """The same operations in orders that hypothesis chooses, and shrinks when one fails."""

    def __init__(self):
        super().__init__()
        self.world = World()

    @rule(seed=st.integers(0, 2**32 - 1))
    def admit(self, seed):
        self.world.admit(random.Random(seed))

    @rule(seed=st.integers(0, 2**32 - 1))
    def step(self, seed):
        self.world.step(random.Random(seed))

    @rule(seed=st.integers(0, 2**32 - 1))
    def guess(self, seed):
        self.world.guess(random.Random(seed))

    @rule(seed=st.integers(0, 2**32 - 1))
    def evict(self, seed):
        self.world.evict(random.Random(seed))

    @invariant()
    def holds(self):
        self.world.check()

    def teardown(self):
        self.world.finish()


def test_any_order_of_operations():
    phases = [Phase.generate, Phase.shrink]
    run_state_machine_as_test(
        Machine,
        settings=settings(max_examples=25, stateful_step_count=30, deadline=None, phases=phases, derandomize=True),
    )
