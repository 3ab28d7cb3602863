"""Lesson 8. Tree, manager, counts and pool alongside a plain dictionary of prefixes, through thousands of calls.

The pool is a dictionary of slots. A token's KV is a digest of all tokens up to it, so reading a block with the wrong
contents is noticed at once.
"""

import random
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mini_engine.base.errors import OutOfBlocks
from mini_engine.kv.cache_coordinator import caching_manager
from mini_engine.kv.eviction import FIFO, LFU, LRU
from mini_engine.kv.radix import RadixTree
from mini_engine.kv.radix_node import key_of
from tests.shared.trees import check_tree, contents, nodes, played

SIZE, USABLE = 4, 24
FAMILIES = [random.Random(seed).choices(range(2), k=60) for seed in range(3)]


class WatchedTree(RadixTree):
    """Reports each evicted block to the world before it can be allocated again."""

    def evict(self, num_blocks):
        gone = super().evict(num_blocks)
        for block in gone:
            self.world.on_evicted(block)
        return gone


class One:
    """A request as the world sees it. `digests[i]` stands for tokens 0 … i."""

    def __init__(self, name, namespace, tokens):
        self.name, self.namespace, self.computed = name, namespace, 0
        self.tokens, self.digests = [], []
        self.extend(tokens)

    def extend(self, tokens):
        for token in tokens:
            self.digests.append(hash((self.digests[-1] if self.digests else self.namespace, token)))
            self.tokens.append(token)

    def cut(self, length):
        del self.tokens[length:], self.digests[length:]
        self.computed = min(self.computed, length)

    def prefixes(self, num_tokens):
        """Return (namespace, tokens of the first 1, 2, … whole blocks) for each whole block."""
        key = key_of(self.tokens[:num_tokens])
        return [(self.namespace, key[: end * 4]) for end in range(SIZE, num_tokens + 1, SIZE)]


class World:
    """A manager, what it should have stored, and what its blocks should hold. `calls` counts the manager's calls."""

    def __init__(self, policy=None):
        self.manager = caching_manager(USABLE + 1, SIZE, self.copy, policy=policy)
        self.tree = self.manager.coordinator.prefixes.tree = WatchedTree(SIZE, self.manager.allocator, policy=policy)
        self.tree.world = self
        self.slots, self.stored, self.alive = {}, {}, {}
        self.calls, self.names, self.evicted, self.waits = 0, 0, 0, 0

    def copy(self, sources, targets):
        read = [[self.slots.get(block * SIZE + i) for i in range(SIZE)] for block in sources]
        for block, values in zip(targets, read, strict=True):
            self.slots.update((block * SIZE + i, value) for i, value in enumerate(values))

    def on_evicted(self, block):
        prefix = next((prefix for prefix, stored in self.stored.items() if stored == block), None)
        assert prefix is not None, f"block {block} was evicted but had never been stored"
        del self.stored[prefix]
        self.evicted += 1
        left = [p for p in self.stored if p[0] == prefix[0] and p[1].startswith(prefix[1])]
        assert not left, "a parent was evicted before its children"
        assert self.manager.allocator.counts[block] == 0, f"block {block} was evicted while it still has holders"
        assert block in self.manager.allocator.free_blocks, "an evicted block must really be free"

    def found(self, one, num_tokens):
        """Return the stored blocks that a prompt begins with, by looking up ever longer prefixes in the dictionary."""
        blocks = []
        for prefix in one.prefixes(num_tokens):
            if prefix not in self.stored:
                break
            blocks.append(self.stored[prefix])
        return blocks

    # What may happen

    def step(self, chance):
        """Admit some, compute a chunk of each request that fits, then commit, abort or finish it, as an engine does."""
        flying = [one for one in self.alive.values() if chance.random() < 0.7 and self.grow(one, chance)]
        for _ in range(chance.randrange(3)):
            one = self.admit(chance)
            if one and self.grow(one, chance):
                flying.append(one)
            elif one:
                self.drop(one, computed=False)
        if chance.random() < 0.05:  # the step fails: no KV of it can be trusted
            for one in flying:
                self.drop(one, computed=False)
            return
        for one, stop in [(one, one.stop) for one in flying]:
            self.write(one, stop)
        for one in flying:
            self.land(one, chance)

    def admit(self, chance):
        family, length = FAMILIES[chance.randrange(3)], chance.randrange(1, 44)
        self.names += 1
        one = One(
            f"r{self.names}",
            chance.choice([0, 0, 0, 1]),
            family[:length] + chance.choices(range(2), k=chance.randrange(4)),
        )
        if -(-len(one.tokens) // SIZE) > USABLE:
            return None
        manager, want = self.manager, self.found(one, len(one.tokens) - 1)
        before, free = self.books(), manager.num_free_blocks
        cost = manager.cost(one.tokens, len(one.tokens), one.namespace)
        self.calls += 1
        assert self.books() == before, "asking for the cost must leave every count and lock as it was"
        assert cost.should_wait == self.is_coming(one, len(want)), "wait exactly for what a running request will store"
        self.waits += cost.should_wait
        if cost.num_blocks > free or (cost.should_wait and chance.random() < 0.8):
            return None
        one.computed = manager.allocate(one.name, one.tokens, one.namespace)
        self.calls += 1
        assert manager.tables[one.name].blocks == want, "the tree must find what the dictionary finds"
        assert one.computed == len(want) * SIZE < len(one.tokens), "at least one token must be computed"
        taken = free - manager.num_free_blocks + manager.missing_blocks(one.name, len(one.tokens))
        assert taken == cost.num_blocks, "an admission must take exactly what `cost` returned"
        self.alive[one.name] = one
        return one

    def is_coming(self, one, index):
        """Whether a running request is writing block `index` of this prompt and will store it."""
        end = (index + 1) * SIZE
        tables = [(other, self.manager.tables[name]) for name, other in self.alive.items()]
        return end < len(one.tokens) and any(
            other.namespace == one.namespace and other.tokens[:end] == one.tokens[:end]
            for other, table in tables
            if table.num_tokens > end - SIZE and table.shared.num_whole > index
        )

    def books(self):
        tree, allocator = self.tree, self.manager.allocator
        return (
            list(allocator.counts),
            set(allocator.free_blocks),
            tree.num_blocks,
            tree.num_protected,
            set(self.manager.tables),
        )

    def grow(self, one, chance):
        """Reserve room for a chunk. Return False, with nothing changed, if there is none."""
        if one.computed == len(one.tokens):
            one.extend(chance.choices(range(2)))
        one.stop = min(len(one.tokens), one.computed + chance.choice([1, 3, 4, 8, 40]))
        self.calls += 1
        missing = self.manager.missing_blocks(one.name, one.stop)
        if missing > self.manager.num_free_blocks:
            before = self.books()
            with pytest.raises(OutOfBlocks):
                self.manager.grow(one.name, one.stop)
            assert self.books() == before, "a refused growth must evict nothing"
            return False
        row = self.manager.grow(one.name, one.stop)
        assert row.tolist() == self.manager.tables[one.name].blocks
        return True

    def write(self, one, stop):
        """Run the forward pass of one chunk. The blocks it writes must have no other holders."""
        blocks = self.manager.tables[one.name].blocks
        for position in range(one.computed, stop):
            block, offset = blocks[position // SIZE], position % SIZE
            others = [name for name, table in self.manager.tables.items() if block in table.blocks and name != one.name]
            assert block not in self.stored.values() and not others, (
                f"{one.name} writes into block {block}, which {others or 'the tree'} holds as well"
            )
            self.slots[block * SIZE + offset] = one.digests[position]

    def land(self, one, chance):
        dice = chance.random()
        if dice < 0.05:  # aborted while the step ran
            return self.drop(one, computed=True)
        one.computed = one.stop
        self.manager.commit(one.name, one.tokens, one.stop)
        self.calls += 1
        whole = min(one.computed, self.manager.tables[one.name].shared.num_whole * SIZE)
        self.store(one, whole // SIZE * SIZE)
        if dice < 0.25:
            self.drop(one, computed=True)
        return None

    def store(self, one, num_tokens):
        """Record newly stored blocks."""
        for prefix, block in zip(one.prefixes(num_tokens), self.manager.tables[one.name].blocks, strict=False):
            self.stored.setdefault(prefix, block)

    def drop(self, one, computed):
        """End a request in any state. What it computed is stored, unless it failed."""
        ids = one.tokens[: one.computed] if computed else []
        self.store(one, len(ids) // SIZE * SIZE)
        self.manager.free(one.name, ids)
        self.calls += 1
        del self.alive[one.name]

    def truncate(self, chance):
        if self.alive:
            one = self.alive[chance.choice(sorted(self.alive))]
            keep = chance.randrange(one.computed + 1)
            self.manager.truncate(one.name, keep)
            one.cut(max(1, keep))
            one.computed = keep
            self.calls += 1

    def clear(self):
        self.calls += 1
        if self.tree.num_protected:
            with pytest.raises(ValueError):
                self.manager.coordinator.clear()
        else:
            self.manager.coordinator.clear()
            assert not self.stored

    def some(self, seed, calls):
        chance, until = random.Random(seed), self.calls + calls
        while self.calls < until:
            dice = chance.random()
            if dice < 0.85:
                self.step(chance)
            elif dice < 0.97:
                self.truncate(chance)
            elif dice < 0.98:
                self.clear()
            elif self.alive:
                self.drop(self.alive[chance.choice(sorted(self.alive))], computed=True)
            self.check_counts()

    # What must be true

    def check_counts(self):
        manager, allocator = self.manager, self.manager.allocator
        assert sum(manager.blocks_by_state) == USABLE, "free + held + cached must be the pool"
        assert min(allocator.counts) >= 0, "a count is negative"
        assert min(manager.blocks_by_state) >= 0
        assert len(allocator.free_blocks) + len(allocator.held) == USABLE

    def check(self):
        """Check everything, by walking all of it."""
        manager = self.manager
        self.check_counts()
        check_tree(self.tree)
        locked = Counter(part for table in manager.tables.values() for part in table.shared.node.path())
        assert all(node.locks == locked[node] for node in nodes(self.tree)), (
            "each request must have exactly one lock on its path"
        )
        assert contents(self.tree) == self.stored, "the tree must hold what the dictionary holds"
        tables = [block for table in manager.tables.values() for block in table.blocks]
        for block in range(1, USABLE + 1):
            holders = tables.count(block) + (block in self.stored.values())
            assert manager.allocator.counts[block] == holders, f"block {block} has {holders} holders"
            assert (block in manager.allocator.free_blocks) == (holders == 0), (
                "a block is free exactly when it has no holders"
            )
        cached = len(set(self.stored.values()) - set(tables))
        assert manager.blocks_by_state.cached == cached, "exactly the blocks that only the tree holds are cached"
        self.check_kv()

    def check_kv(self):
        for (namespace, key), block in self.stored.items():
            digest = namespace
            for index, token in enumerate(memoryview(key).cast("I")):
                digest = hash((digest, token))
                if index >= len(key) // 4 - SIZE:
                    assert self.slots.get(block * SIZE + index % SIZE) == digest, (
                        "a stored block holds the KV of other tokens"
                    )
        for one in self.alive.values():
            blocks = self.manager.tables[one.name].blocks
            for position in range(one.computed):
                slot = blocks[position // SIZE] * SIZE + position % SIZE
                assert self.slots.get(slot) == one.digests[position], f"{one.name} reads what it never computed"

    def finish(self):
        for one in list(self.alive.values()):
            self.drop(one, computed=True)
        self.check()
        self.manager.coordinator.clear()
        assert self.manager.allocator.num_free == USABLE, "blocks leaked"


class PrefixMachine(RuleBasedStateMachine):
    """Hypothesis chooses the policy and what happens. One rule may make hundreds of calls, to reach 100,000 quickly."""

    def __init__(self):
        super().__init__()
        self.world = World()

    @initialize(policy=st.sampled_from([LRU, LFU, FIFO]))
    def begin(self, policy):
        self.world = World(policy())

    @rule(seed=st.integers(0, 2**32))
    def many_calls(self, seed):
        self.world.some(seed, 250)

    @rule(seed=st.integers(0, 2**32))
    def a_step(self, seed):
        self.world.step(random.Random(seed))

    @rule(seed=st.integers(0, 2**32))
    def a_truncation(self, seed):
        self.world.truncate(random.Random(seed))

    @rule()
    def a_clear(self):
        self.world.clear()

    @invariant()
    def the_books_are_right(self):
        self.world.check()

    def teardown(self):
        self.world.finish()


def test_thousands_of_calls_keep_tree_manager_pool_and_dictionary_equal():
    assert sum(world.calls for world in played(PrefixMachine, 10, 50)) >= 4000


@pytest.mark.nightly
def test_100_000_calls_keep_tree_manager_pool_and_dictionary_equal():
    worlds = played(PrefixMachine, 120, 50)
    assert sum(world.calls for world in worlds) >= 100_000
    assert sum(world.evicted for world in worlds) > 1000 and sum(world.waits for world in worlds) > 1000
    assert sum(world.manager.coordinator.prefixes.stats.num_hits for world in worlds) > 1000
