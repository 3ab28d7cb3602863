"""Lesson 15. States and windows as one memory, under random calls and beside a connector that fails at every point."""

import random
from collections import Counter
from functools import partial

import pytest

from mini_engine.hybrid.memory import StateMemory
from mini_engine.kv.cache_coordinator import coordinated
from mini_engine.kv.connector import NOTHING, KvConnector, Load
from mini_engine.kv.memories import Memories
from mini_engine.kv.prefix_cache import PrefixCache
from mini_engine.kv.radix_node import key_of
from tests.l8.trees import check_tree
from tests.l11.ledger import Ledger
from tests.l15.ledger import NULL, Windows
from tests.support import thorough

SIZE, INTERVAL, MOST, SPARE = 4, 8, 8, 3
FAMILIES = [random.Random(seed).choices(range(3), k=60) for seed in range(3)]


class Elsewhere(KvConnector):
    """A connector that has the KV, the windows and the state of every text, and fails now and then.

    Attributes:
        failures: how often it has failed, by the place where it did.
    """

    def __init__(self, kv, chance):
        self.kv, self.chance, self.failures, self.num_loaded = kv, chance, Counter(), 0

    def fail(self, where, how_often=0.1):
        if self.chance.random() < how_often:
            self.failures[where] += 1
            raise RuntimeError(f"the connector fails: {where}")

    def start_load_kv(self, request_id, token_ids, namespace, num_computed_tokens, may_wait):
        self.fail("start")
        most = (len(token_ids) - 1) // SIZE - num_computed_tokens // SIZE
        if most < 1 or self.chance.random() < 0.5:
            return NOTHING
        stop = num_computed_tokens + self.chance.randrange(1, most + 1) * SIZE
        return Texts(self, list(token_ids[:stop]), num_computed_tokens)

    def update_state_after_alloc(self, request_id, table, num_computed_tokens):
        self.fail("update")

    def save_kv(self, request_id, stored, is_kept):
        self.fail("save")

    def request_finished(self, request_id):
        self.fail("finished")


class Texts(Load):
    """The KV of tokens from `start` on."""

    def __init__(self, connector, tokens, start):
        self.connector, self.tokens, self.start = connector, tokens, start

    @property
    def num_tokens(self):
        return len(self.tokens) - self.start

    def into(self, request_id, blocks):
        """Write group 0, then the windows, then the state; it may fail before and after each."""
        kv, stop = self.connector.kv, len(self.tokens)
        rows = kv.rows_of(request_id, [*kv.tables[request_id].blocks])
        for group, row in enumerate(rows):
            self.connector.fail("into")
            for position in range(self.start, stop):
                if row[position // SIZE] != NULL:
                    kv.slots[row[position // SIZE], position % SIZE] = (group, tuple(self.tokens[: position + 1]))
        self.connector.fail("into")
        kv.states.seen[kv.slot(request_id)] = tuple(self.tokens)
        self.connector.fail("into")
        self.connector.num_loaded += 1


class World(Windows):
    """A manager of requests with a state and windows. `memory` is that of the windows, `both` both."""

    def __init__(self, chance):
        self.chance = chance
        num_blocks, slots, track = chance.choice([31, 41, 71]), chance.choice([2, 4]), chance.choice([1, 3, 8])
        super().__init__(chance.choice([2, 6, 9, 17]), chance.choice([1, 2, 3]), num_blocks, SIZE, MOST)
        self.states = Ledger(slots + SPARE, track)
        self.state_memory = StateMemory(self.states, SIZE, INTERVAL, SPARE)
        self.states.checkpoints = self.state_memory.checkpoints
        self.both = Memories([self.state_memory, self.memory])
        self.connector = Elsewhere(self, chance)
        cache = partial(PrefixCache, memory=self.both, allocator=self.allocator)
        self.manager = coordinated(num_blocks, SIZE, prefixes=cache, connector=self.connector, copy=self.copied)
        self.alive, self.did = {}, Counter()

    def copied(self, sources, targets):
        raise AssertionError("no block of a request that cannot be taken back is ever written by two")

    def slot(self, name):
        return self.state_memory.slots_of(name)[0]

    def rows_of(self, name, blocks):
        return [blocks, *map(list, self.hold(name).table.rows)]

    def promised(self):
        return sum(self.missing_blocks(name, len(text)) for name, text in self.alive.items())

    def admit(self):
        chance, stem = self.chance, self.chance.choice(FAMILIES)
        tokens = stem[: chance.randrange(1, 50)] + chance.choices(range(3), k=chance.randrange(6))
        cost = self.cost(tokens, len(tokens))
        if not self.both.has_room or cost.num_blocks > self.num_free_blocks - self.promised():
            return
        name = f"r{self.did['admitted']}"
        found = self.allocate(name, tokens)
        self.did["admitted"], self.did["found"] = self.did["admitted"] + 1, self.did["found"] + (found > 0)
        self.alive[name] = tokens
        assert self.promised() <= self.num_free_blocks, "what is promised to the others is still there"
        self.check(name, found)

    def check(self, name, num_computed):
        """Both memories are after the same tokens, and hold what the next one needs."""
        tokens = self.alive[name]
        assert self.hold(name).num_computed == self.state_memory.holds[name].num_computed == num_computed
        assert self.states.seen[self.slot(name)] == tuple(tokens[:num_computed]), "the state has seen another text"
        self.check_reads(name, tokens, num_computed, num_computed)

    def step(self, name):
        tokens, start = self.alive[name], self.hold(name).num_computed
        if start == len(tokens):
            tokens.append(self.chance.randrange(3))
            if self.promised() > self.num_free_blocks:
                return self.end(name)
        stop = self.chunk_end(name, start, min(len(tokens), start + self.chance.randrange(1, MOST + 1)))
        self.grow(name, stop)
        self.write(name, tokens, start, stop)
        self.check_reads(name, tokens, start, stop)
        self.states.advance(self.slot(name), tokens[start:stop])
        if self.chance.random() < 0.03:
            return self.end(name, start)
        self.commit(name, tokens, stop)
        self.check(name, stop)

    def guess(self, name):
        """Feed the newest token with drafts behind it, and take the wrong ones back."""
        tokens, start = self.alive[name], self.hold(name).num_computed
        count = min(self.chance.randrange(1, 4), len(self.state_memory.free_slots))
        if start != len(tokens) - 1 or count == 0:
            return
        others = self.promised() - self.missing_blocks(name, len(tokens))
        if self.missing_blocks(name, start + 1 + count) > self.num_free_blocks - others:
            return
        stop, drafts = start + 1 + count, self.chance.choices(range(3), k=count)
        self.grow(name, stop)
        self.coordinator.announce_truncation(name, count)
        text, slots = [*tokens, *drafts], list(self.state_memory.slots_of(name))
        self.write(name, text, start, stop)
        self.check_reads(name, text, start, stop)
        for index, slot in enumerate(slots):
            self.states.seen[slot] = tuple(text[: start + 1 + index])
        standing = self.chance.randrange(count + 1)
        tokens += drafts[:standing]
        for done in range(start + 1, start + 2 + standing):
            self.commit(name, tokens, done)
        self.truncate(name, start + 1 + standing)
        self.did["guessed"] += 1
        self.check(name, start + 1 + standing)

    def refuse(self, name):
        """A computed token cannot be taken back; whichever memory says so, nothing has changed."""
        num_computed = self.hold(name).num_computed
        if num_computed:
            before = self.held(name)
            with pytest.raises(ValueError):
                self.truncate(name, self.chance.randrange(num_computed))
            assert self.held(name) == before

    def held(self, name):
        return [list(row) for row in self.rows(name)], list(self.state_memory.slots_of(name)), self.num_free_blocks

    def end(self, name, num_computed=None):
        tokens = self.alive.pop(name)
        self.free(name, tokens[: self.hold(name).num_computed if num_computed is None else num_computed])

    def press(self):
        """Give up a part of what is cached: companions, checkpoints, or ends of the tree's leaves."""
        chance, what = self.chance, self.chance.randrange(5)
        if what == 0:
            self.both.trim(chance.randrange(4))
        elif what == 1:
            self.both.evict(chance.randrange(4))
        elif what == 2:
            self.tree.evict(chance.randrange(4))
        elif what == 3 and self.state_memory.checkpoints.slots:
            self.state_memory.checkpoints.drop(chance.choice(list(self.state_memory.checkpoints.slots)))
        elif not self.tree.num_protected:
            self.coordinator.clear()

    def check_all(self):
        check_tree(self.tree)
        for stem in FAMILIES:
            key = key_of(stem)
            end = self.both.last(self.tree, key, None)
            path = self.tree.path(key[: end * 4], None)
            blocks = self.tree.prefix(key[: end * 4], None)
            assert len(blocks) * SIZE == end, "a request can begin only after what is stored"
            assert end == 0 or path[0] in self.state_memory.checkpoints, "a request cannot begin without a state"
            first = self.kept.first_block(end)
            assert all(block in self.kept.companions for block in blocks[first:]), "nor without a window"
            for node, slot in ((n, self.state_memory.checkpoints.slots.get(n)) for n in path):
                if slot is not None:
                    length = sum(len(part.blocks) for part in node.path()) * SIZE
                    assert self.states.seen[slot] == tuple(stem[:length]), "a checkpoint is of another text"


@pytest.mark.parametrize("seed", range(thorough(40, 10)))
def test_memories_agree_whatever_happens_to_either(seed, caplog):
    caplog.set_level("CRITICAL")
    world = World(chance := random.Random(seed))
    for _ in range(150):
        world.admit()
        if chance.random() < 0.1:
            world.press()
        for name in list(world.alive):
            dice = chance.random()
            if dice < 0.05:
                world.refuse(name)
            elif dice < 0.25:
                world.guess(name)
            elif dice < 0.32 or len(world.alive[name]) > 70:
                world.end(name)
            else:
                world.step(name)
        world.check_all()
    assert world.did["found"] and world.connector.num_loaded and world.connector.failures, world.did
    for name in list(world.alive):
        world.end(name)
    world.coordinator.clear()
    assert world.allocator.num_free == world.allocator.num_blocks - 1, "blocks are lost"
    assert len(world.state_memory.free_slots) == world.states.max_reqs, "slots are lost"
    assert not world.states.held_track_slots and not world.kept.companions and not world.kept.proven
    assert not world.memory.holds and not world.state_memory.holds
