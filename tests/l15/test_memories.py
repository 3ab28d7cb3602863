"""Lesson 15. Several memories as one: a request begins at the longest prefix from which all of them can resume."""

import random
from collections import Counter
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.hybrid.memory import StateMemory
from mini_engine.kv.cache_coordinator import coordinated
from mini_engine.kv.connector import NO_CONNECTOR, NOTHING, KvConnector, Load
from mini_engine.kv.memories import Memories
from mini_engine.kv.memory import CacheMemory
from mini_engine.kv.prefix_cache import PrefixCache
from mini_engine.kv.radix_node import TOKEN_BYTES, key_of
from tests.shared.trees import check_tree
from tests.shared.window_ledger import NULL, Windows, compute
from tests.support import thorough
from tests.worlds import FAMILIES, Ledger, World

SIZE, INTERVAL, MOST, SPARE = 4, 8, 8, 3


class Places(CacheMemory):
    """A memory that can resume after these numbers of tokens, and after none of the others."""

    def __init__(self, places):
        self.places = {0, *places}

    def last(self, tree, key, namespace):
        return max(place for place in self.places if place <= len(key) // TOKEN_BYTES)


@given(st.lists(st.sets(st.integers(0, 40)), min_size=2, max_size=4), st.integers(0, 45))
def test_the_hit_is_the_longest_prefix_that_all_can_resume_from(places, length):
    found = Memories([Places(some) for some in places]).last(None, bytes(length * TOKEN_BYTES), None)
    assert found == max(place for place in {0}.union(set.intersection(*places)) if place <= length), (
        f"{places}: asking each once is not enough, since the answer of one may suit the others no more"
    )


def test_the_page_s_example_takes_two_rounds():
    states, windows = Places({32, 96}), Places({16, 32, 64, 80})
    assert Memories([states, windows]).last(None, bytes(96 * TOKEN_BYTES), None) == 32


def no_connector(kv):
    return NO_CONNECTOR


class Both(Windows):
    """A manager whose requests need a state and windows. `memory` is that of the windows, `both` both.

    connector: makes the manager's connector, given this object.
    """

    def __init__(self, window=6, num_groups=2, num_blocks=71, slots=4, track=5, connector=no_connector):
        super().__init__(window, num_groups, num_blocks, SIZE, MOST)
        self.states = Ledger(slots + SPARE, track)
        self.state_memory = StateMemory(self.states, SIZE, INTERVAL, SPARE)
        self.states.checkpoints = self.state_memory.checkpoints
        self.both = Memories([self.state_memory, self.memory])
        cache = partial(PrefixCache, memory=self.both, allocator=self.allocator)
        self.manager = coordinated(num_blocks, SIZE, prefixes=cache, connector=connector(self))

    def slots_of(self, name):
        return self.state_memory.slots_of(name)

    def places(self, tokens, namespace=0):
        """Return after how many tokens both can resume, counted by hand."""
        key, found = key_of(tokens[: len(tokens) // SIZE * SIZE]), [0]
        for node in self.tree.path(key, namespace):
            end = sum(len(part.blocks) for part in node.path())
            blocks = self.tree.prefix(key[: end * SIZE * TOKEN_BYTES], namespace)
            window = blocks[max(0, end * SIZE - self.window + 1) // SIZE :]
            if node in self.state_memory.checkpoints and all(block in self.kept.companions for block in window):
                found.append(end * SIZE)
        return found


def test_a_state_is_kept_with_the_window_before_it():
    kv, tokens = Both(window=9), list(range(40))
    kv.allocate("a", tokens)
    for stop in range(INTERVAL, 41, INTERVAL):
        kv.states.advance(kv.slots_of("a")[0], tokens[stop - INTERVAL : stop])
        compute(kv, "a", tokens[:stop])
    kv.free("a", tokens)
    kv.both.trim(1000)
    assert kv.allocate("b", [*tokens[:24], 99]) == 24, (
        "a checkpoint after 24 tokens is of no use once its window has been given up: they are kept together"
    )


# ---------------------------------------------------------------- random calls


class Elsewhere(KvConnector):
    """A connector that has the KV, the windows and the state of every text, and fails now and then.

    Attributes:
        failures: how often it has failed, by the place where it did.
    """

    def __init__(self, kv, chance):
        self.kv, self.chance, self.failures, self.num_loaded = kv, chance, Counter(), 0

    def fail(self, where):
        if self.chance.random() < 0.1:
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
        kv = self.connector.kv
        for group, row in enumerate(kv.rows(request_id)):
            self.connector.fail("into")
            for position in range(self.start, len(self.tokens)):
                if row[position // SIZE] != NULL:
                    kv.slots[row[position // SIZE], position % SIZE] = (group, tuple(self.tokens[: position + 1]))
        self.connector.fail("into")
        kv.states.seen[kv.slots_of(request_id)[0]] = tuple(self.tokens)
        self.connector.fail("into")
        self.connector.num_loaded += 1


class BothWorld(World):
    """Requests with a state and windows, alone or beside a connector that fails at every point."""

    has_promises = True

    def __init__(self, chance, connector=None):
        window, groups, blocks = chance.choice([2, 6, 9, 17]), chance.choice([1, 2, 3]), chance.choice([31, 41, 71])
        slots, track = chance.choice([2, 4]), chance.choice([1, 3, 8])
        super().__init__(Both(window, groups, blocks, slots, track, connector or no_connector), SIZE)
        self.has_exact_cost = connector is None
        kept = self.kv.state_memory.checkpoints
        self.evictors += [self.kv.both.trim, self.kv.both.evict, lambda n: [kept.drop(x) for x in list(kept.slots)[:n]]]

    def may_begin(self, tokens, namespace, cost, chance):
        self.expected = max(self.kv.places(tokens[: (len(tokens) - 1) // SIZE * SIZE], namespace))
        return self.kv.both.has_room and cost.num_blocks <= self.kv.num_free_blocks - self.promised()

    def check_begin(self, name, found):
        memory = self.kv.memory
        assert found == self.expected or (found > self.expected and not self.has_exact_cost), (
            "the longest that both have"
        )
        # a load may go past a window that others hold too, whose blocks do not become free
        more = 0 if self.has_exact_cost else memory.num_groups * memory.most_held
        assert self.promised() <= self.kv.num_free_blocks + more, "what is promised to the others is still there"
        self.check_one(name)

    def chunk(self, name, start, stop, chance):
        return self.kv.chunk_end(name, start, min(stop, start + chance.randint(1, MOST)))

    def has_room(self, name, stop):
        return self.promised() <= self.kv.num_free_blocks

    def write(self, name, tokens, start, stop):
        self.kv.write(name, tokens, start, stop)
        self.kv.check_reads(name, tokens, start, stop)
        self.kv.states.advance(self.kv.slots_of(name)[0], tokens[start:stop])

    def write_drafts(self, name, tokens, start, count):
        self.kv.write(name, tokens, start, start + 1 + count)
        self.kv.check_reads(name, tokens, start, start + 1 + count)
        for index, slot in enumerate(self.kv.slots_of(name)):
            self.kv.states.seen[slot] = tuple(tokens[: start + 1 + index])

    def roll_back(self, chance):
        def held():
            return [(self.kv.rows(name), list(self.kv.slots_of(name))) for name in self.alive], self.kv.num_free_blocks

        before = held()
        super().roll_back(chance)
        assert held() == before, "whichever memory refuses, nothing has changed"

    def check_one(self, name):
        """Both memories are after the same tokens, and hold what the next one needs."""
        kv, tokens, done = self.kv, self.alive[name], self.kv.hold(name).num_computed
        assert kv.state_memory.holds[name].num_computed == done
        assert kv.states.seen[kv.slots_of(name)[0]] == tuple(tokens[:done]), "the state has seen another text"
        kv.check_reads(name, tokens, done, done)

    def check(self):
        kv = self.kv
        check_tree(kv.tree)
        for name in self.alive:
            self.check_one(name)
        for stem in FAMILIES:
            assert kv.both.last(kv.tree, key_of(stem), 0) == max(kv.places(stem)), "the longest that both have"
            for node in kv.tree.path(key_of(stem), 0):
                if (slot := kv.state_memory.checkpoints.slots.get(node)) is not None:
                    length = sum(len(part.blocks) for part in node.path()) * SIZE
                    assert kv.states.seen[slot] == tuple(stem[:length]), "a checkpoint is of another text"

    def finish(self):
        super().finish()
        kv = self.kv
        assert len(kv.state_memory.free_slots) == kv.states.max_reqs, "slots are lost"
        assert not kv.states.held_track_slots and not kv.kept.companions and not kv.kept.proven
        assert not kv.memory.holds and not kv.state_memory.holds


@pytest.mark.parametrize("fails", [False, True], ids=["alone", "beside a connector that fails"])
@pytest.mark.parametrize("seed", range(thorough(20, 10)))
def test_memories_agree_whatever_happens_to_either(seed, fails, caplog):
    caplog.set_level("CRITICAL")
    chance = random.Random(seed)
    world = BothWorld(chance, partial(Elsewhere, chance=random.Random(seed)) if fails else None)
    for turn in range(30):
        world.some(1000 * seed + turn, 20)
        world.check()
    world.finish()
    connector = world.kv.coordinator.connector
    assert world.did["found"] and (not fails or (connector.num_loaded and connector.failures)), world.did
