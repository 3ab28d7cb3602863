"""Lesson 15. Tables, tree and companions through random operations: nothing leaks, nothing reads a hole, W bounds all.

Each slot of the pool holds its group and the tokens up to its own, so a block that was freed too early, adopted from
the wrong group or found behind the wrong text is noticed by the first query that sees it.
"""

from collections import Counter

import pytest

from tests.shared.trees import check_tree, nodes
from tests.shared.window_ledger import NULL, Windows
from tests.worlds import World, played

USABLE = 70
SHAPES = [(6, 2, 4, 8), (2, 1, 4, 8), (9, 3, 4, 5), (5, 2, 1, 7), (17, 1, 16, 16), (3, 4, 8, 1)]


class WindowWorld(World):
    """A manager of requests with windows. What was promised to a request is never given to another."""

    has_promises = True

    def __init__(self, window=6, num_groups=2, size=4, max_step=8):
        super().__init__(Windows(window, num_groups, USABLE + 1, size, max_step), size)
        self.window, self.num_groups, self.max_step = window, num_groups, max_step
        self.most_drafts = min(3, max_step - 1)
        self.evictors += [self.kv.kept.trim, self.kv.kept.evict]

    def may_begin(self, tokens, namespace, cost, chance):
        return cost.num_blocks <= self.kv.num_free_blocks - self.promised()

    def check_begin(self, name, found):
        self.kv.check_reads(name, self.alive[name], found, found)
        self.did["shorter"] += found < self.kv.coordinator.prefixes.num_known(self.kv.tables[name])

    def chunk(self, name, start, stop, chance):
        return min(stop, start + chance.randint(1, self.max_step))

    def has_room(self, name, stop):
        return self.promised() <= self.kv.num_free_blocks

    def grow(self, name, stop):
        """Take blocks for a chunk. What is promised is there, so this raises nothing."""
        tokens, memory = self.alive[name], self.kv.memory
        reserved, missing = memory.num_reserved(name, len(tokens)), memory.num_missing(name, stop)
        assert missing <= reserved, f"{missing} blocks are needed for a chunk of a request that was promised {reserved}"
        if len(tokens) - self.kv.hold(name).num_computed <= self.max_step:
            exact = memory.num_missing(name, len(tokens))
            assert reserved == exact, f"the last {self.max_step} tokens are one step, which takes {exact} blocks"
        super().grow(name, stop)

    def write(self, name, tokens, start, stop):
        self.kv.write(name, tokens, start, stop)
        self.kv.check_reads(name, tokens, start, stop)
        most = -(-(self.window - 1) // self.size) + 2 + -(-(stop - start - 1) // self.size)
        held = self.kv.held_by_windows(name)
        assert held <= most, f"{name} feeds {stop - start} and holds {held} blocks of a window group; {most} are enough"

    def write_drafts(self, name, tokens, start, count):
        self.write(name, tokens, start, start + 1 + count)

    def commit(self, name, stop):
        def has_or_is_promised():
            reserved = self.kv.memory.num_reserved(name, len(self.alive[name]))
            return self.kv.hold(name).table.num_held + reserved

        before = has_or_is_promised()
        super().commit(name, stop)
        assert has_or_is_promised() <= before, "a promise never grows: what a step frees is reused by the next one"

    def check(self):
        kv = self.kv
        check_tree(kv.tree)
        in_tree = {block for node in nodes(kv.tree) for block in node.blocks}
        holders = Counter(in_tree)
        for name, tokens in self.alive.items():
            done = kv.hold(name).num_computed
            kv.check_reads(name, tokens, done, done)
            main, *others = kv.rows(name)
            assert all(len(row) == len(main) for row in others), "the groups of a request reach equally far"
            holes = min(max(0, done // self.size * self.size - self.window + 1) // self.size, len(main))
            assert [others[0].count(NULL), any(others[0][:holes])] == [holes, False], (
                f"{name} has computed {done} tokens, so its first {holes} blocks can be seen by no later one"
            )
            holders.update(block for row in (main, *others) for block in row if block != NULL)
        assert set(kv.kept.companions) <= in_tree, "a companion of a block that has left the tree"
        for companion in kv.kept.companions.values():
            holders.update(companion)
        counts = {block: count for block, count in enumerate(kv.allocator.counts) if count}
        assert counts == dict(holders), "a count is the number of holders; something leaked or was freed twice"
        alone = [one for one in kv.kept.companions.values() if kv.allocator.counts[one[0]] == 1]
        assert kv.kept.num_evictable == self.num_groups * len(alone), "what only the tree holds is evictable"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_thousands_of_operations(shape):
    world = WindowWorld(*shape)
    for seed in range(20):
        world.some(seed, 60)
        world.check()
    world.finish()
    assert world.did["found"] > 200, "no prefix was ever found, so this test has seen nothing"


def test_any_order_of_operations():
    played(WindowWorld, 25, 5)
