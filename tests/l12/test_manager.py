"""Lesson 12. Whatever is served from a tier is what a cold run would compute, through any order of calls and restarts.

The pool is an array of numbers. A token's KV is a digest of all tokens up to it, so a block from the wrong place, of
the wrong text or of another namespace is noticed at once.
"""

import math
import random
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lessons.l12_tiers.compact import compact
from mini_engine.base.errors import OutOfBlocks
from mini_engine.kv.cache_coordinator import coordinated
from mini_engine.kv.prefix_cache import PrefixCache
from mini_engine.kv.radix_node import TOKEN_BYTES, key_of
from mini_engine.tiers.connector import TierConnector
from mini_engine.tiers.keys import Identity
from mini_engine.tiers.store import ALWAYS, BlockStore, MinTokens
from mini_engine.tiers.tiers import Tiers
from tests.shared.tier_cells import BLOCKS, SIZE, Cells, digests
from tests.shared.trees import holders
from tests.support import thorough

IDENTITY = Identity("weights", "config", "int64", SIZE)
FAMILIES = [random.Random(seed).choices(range(2), k=60) for seed in range(3)]


class World:
    """A manager with tiers, the pool's cells, and what each request has computed."""

    def __init__(self, directory=None, host_bytes=10**6, min_tokens=ALWAYS, cells=None):
        self.cells = cells or Cells()
        self.tiers = Tiers.of_size(directory, host_bytes, 10**7)
        self.store = BlockStore(self.tiers, self.cells, IDENTITY, min_tokens)
        connector = TierConnector(self.store)
        self.manager = coordinated(BLOCKS, SIZE, self.cells.copy, prefixes=PrefixCache, connector=connector)
        self.requests = {}

    def begin(self, name, tokens, namespace=None):
        """Admit a request if its blocks fit; check what was found; compute the rest. Return the tokens found."""
        while (cost := self.manager.cost(tokens, len(tokens), namespace)).should_wait:
            time.sleep(0.0005)  # the disk is being read
        if cost.num_blocks > self.manager.num_free_blocks:
            return None
        found = self.manager.allocate(name, tokens, namespace)
        self.requests[name] = [list(tokens), namespace, found]
        assert found < len(tokens), "one token at least must be left to compute"
        self.check(name)
        try:
            self.compute(name)
        except OutOfBlocks:
            self.end(name)
        return found

    def compute(self, name):
        tokens, namespace, computed = self.requests[name]
        self.manager.grow(name, len(tokens))
        table = self.manager.tables[name]
        for index, digest in enumerate(digests(namespace, tokens)):
            if index >= computed:
                self.cells.slots[table.blocks[index // SIZE] * SIZE + index % SIZE] = digest
        self.requests[name][2] = len(tokens)
        self.manager.commit(name, tokens, len(tokens))
        self.tiers.flush()
        self.check(name)

    def check(self, name):
        tokens, namespace, computed = self.requests[name]
        blocks = self.manager.tables[name].blocks
        assert list(self.manager.tables[name].row) == blocks, "the row that kernels read must name the same blocks"
        seen = [self.cells.slots[blocks[i // SIZE] * SIZE + i % SIZE] for i in range(computed)]
        assert seen == digests(namespace, tokens)[:computed], f"{name} reads KV that a cold run would not compute"

    def end(self, name):
        tokens, _, computed = self.requests.pop(name)
        self.manager.free(name, tokens[:computed])
        self.tiers.flush()  # so that a run can be repeated, whatever the disk's speed

    def serve(self, name, tokens, namespace=None):
        """Serve a whole request, whose blocks are evicted from the pool then; return the tokens found."""
        found = self.begin(name, tokens, namespace)
        self.end(name)
        evict_all(self)
        return found

    def close(self):
        for name in list(self.requests):
            self.end(name)
        self.tiers.close()


@pytest.fixture
def world(opened):
    return opened(World())


def evict_all(world):
    world.manager.coordinator.prefixes.tree.evict(BLOCKS)


def test_an_evicted_prefix_comes_back_from_the_tier(world):
    tokens = list(range(14))
    assert world.serve("a", tokens) == 0
    assert world.begin("b", tokens) == 12, "three whole blocks were in the tier; the last token is always computed"
    assert world.store.restored_tokens == 12
    assert world.begin("twin", tokens) == 12, "b runs, and the tree has the blocks that came back"
    assert world.store.restored_tokens == 12, "so they are not copied a second time"
    world.end("twin")
    world.end("b")
    assert world.begin("c", tokens) == 12 and world.store.restored_tokens == 12, "now the tree has them again"


def test_the_tier_goes_on_where_the_tree_ends(world):
    tokens = list(range(17))
    world.begin("a", tokens)
    world.end("a")
    world.manager.coordinator.prefixes.tree.evict(2)
    assert world.begin("b", tokens) == 16
    assert world.store.restored_tokens == 8, "only what the tree lacks is copied"
    told = world.manager.coordinator.prefixes.stats
    assert (told.asked_tokens, told.found_tokens) == (34, 16), "8 tokens from the tree and 8 from the tier, each once"
    assert (told.num_lookups, told.num_hits) == (2, 1), "the second lookup was a hit, in the tree already"


def test_a_hit_in_the_tiers_alone_is_counted_as_one(world):
    world.serve("a", list(range(14)))
    world.begin("b", list(range(14)))
    told = world.manager.coordinator.prefixes.stats
    assert (told.num_lookups, told.num_hits, told.found_tokens) == (2, 1, 12), "the tiers found what the tree had lost"
    world.begin("c", [9] * 9)
    assert (told.num_lookups, told.num_hits, told.found_tokens) == (3, 1, 12), "nothing is known of c's prompt"


def test_a_block_is_saved_once_it_is_complete(world):
    tokens = list(range(12))
    world.manager.allocate("a", tokens)
    world.manager.grow("a", 12)
    world.manager.commit("a", tokens, 7)
    assert len(world.tiers.host) == 1, "only blocks whose K and V are complete go to the tiers"
    world.manager.commit("a", tokens, 8)
    assert len(world.tiers.host) == 2
    world.manager.free("a", tokens[:8])


def test_a_prompt_of_whole_blocks_leaves_its_last_one_to_compute(world):
    tokens = list(range(12))
    world.serve("a", tokens)
    assert world.begin("b", tokens) == 8, "the last token must be computed, so its block is not asked for"


def test_a_namespace_without_bytes_is_served_without_tiers(world):
    world.serve("a", list(range(12)), ("a", "tuple"))
    assert world.begin("b", list(range(12)), ("a", "tuple")) == 0 and len(world.tiers.host) == 0


def test_without_room_the_request_begins_with_what_the_tree_has(opened):
    world = opened(World())
    tokens = list(range(4 * SIZE + 1))
    world.serve("a", tokens)
    held = world.manager.allocator.alloc_blocks(BLOCKS - 3)
    assert world.manager.allocate("b", tokens) == 0, "two blocks are free, and four would be needed"
    world.manager.free("b")
    world.manager.allocator.free(held)


@pytest.fixture
def on_disk(tmp_path, opened):
    """Return a function that returns a new world whose disk has the whole blocks of a text."""

    def make(tokens, **options):
        first = World(tmp_path)
        first.begin("a", tokens)
        first.close()
        return opened(World(tmp_path, **options))

    return make


def test_a_slow_disk_does_not_keep_host_memory_from_being_used(on_disk):
    world = on_disk(list(range(14)), min_tokens=MinTokens(disk=math.inf))
    assert world.serve("b", list(range(14))) == 0, "only on the disk, which takes longer than computing"
    assert world.begin("c", list(range(14))) == 12, "in host memory since it was computed"


def test_a_request_that_is_alone_reads_the_disk_itself(on_disk):
    world = on_disk(list(range(14)))
    assert world.begin("b", list(range(14))) == 12 and world.tiers.num_found == {"host": 0, "disk": 3}, (
        "no other request waits for this step"
    )


def test_a_request_beside_others_does_not_read_the_disk_in_its_step(on_disk):
    world = on_disk(list(range(14)))
    world.begin("other", [9] * 5)
    assert world.manager.allocate("b", list(range(14))) == 0, "the other request's step would wait for the disk"
    world.manager.free("b")


def test_what_the_tree_has_is_not_read_ahead_and_what_is_behind_it_is(on_disk):
    world = on_disk(list(range(17)))
    world.begin("other", [9] * 5)
    world.begin("short", list(range(5)))
    world.end("short")
    asked = []
    world.tiers.prefetch = lambda wanted: asked.extend(wanted) or True
    assert world.manager.cost(list(range(17)), 17).should_wait
    assert [one.tokens for one in asked] == [bytes(key_of(range(start, start + 4))) for start in (4, 8, 12)], (
        "the tree has the first block; the three behind it are asked for"
    )


class Machine(RuleBasedStateMachine):
    """Requests begin, grow, end, are cut short and preempted; prefixes are evicted; the process starts again."""

    @initialize(host=st.sampled_from([0, 200, 10**6]), disk=st.booleans())
    def start(self, host, disk):
        self.folder = tempfile.TemporaryDirectory(prefix="kv-course-", ignore_cleanup_errors=True)
        self.host, self.directory = host, Path(self.folder.name) if disk else None
        self.world = self.new_world()
        self.count = 0

    def new_world(self):
        return World(self.directory, self.host)

    def name(self):
        self.count += 1
        return f"r{self.count}"

    def pick(self, number):
        return sorted(self.world.requests)[number % len(self.world.requests)]

    @rule(family=st.sampled_from(FAMILIES), length=st.integers(1, 40), namespace=st.sampled_from([None, "a"]))
    def begin(self, family, length, namespace):
        self.world.begin(self.name(), family[:length], namespace)

    @precondition(lambda self: self.world.requests)
    @rule(number=st.integers(0, 9), token=st.integers(0, 1))
    def decode(self, number, token):
        name = self.pick(number)
        self.world.requests[name][0].append(token)
        try:
            self.world.compute(name)
        except OutOfBlocks:
            self.world.requests[name][0].pop()
            self.world.end(name)

    @precondition(lambda self: self.world.requests)
    @rule(number=st.integers(0, 9))
    def end(self, number):
        self.world.end(self.pick(number))

    @precondition(lambda self: self.world.requests)
    @rule(number=st.integers(0, 9), cut=st.integers(1, 8))
    def truncate(self, number, cut):
        name = self.pick(number)
        tokens, _, _ = self.world.requests[name]
        del tokens[max(1, len(tokens) - cut) :]
        self.world.requests[name][2] = len(tokens)
        self.world.manager.truncate(name, len(tokens))

    @rule(count=st.integers(1, BLOCKS))
    def evict(self, count):
        self.world.manager.coordinator.prefixes.tree.evict(count)

    @rule()
    def compact(self):
        compact(self.world.manager)
        held = self.world.manager.allocator.held
        assert held == set(range(1, len(held) + 1)), "after compaction the held blocks are the first ones"

    @rule()
    def restart(self):
        self.world.close()
        self.world = self.new_world()

    @invariant()
    def every_request_reads_its_own_text(self):
        for name in self.world.requests:
            self.world.check(name)

    @invariant()
    def each_block_is_free_or_counted(self):
        allocator = self.world.manager.allocator
        assert holders(self.world.manager) == allocator.counts, (
            "a block's count is the number of tables and tree nodes that hold it"
        )
        assert sorted([*allocator.free_blocks, *allocator.held]) == list(range(1, BLOCKS)), "no block is lost"

    @invariant()
    def the_tiers_keep_to_their_size(self):
        host = self.world.tiers.host
        assert host.num_bytes == sum(one.num_bytes for one in host.records.values()) <= host.max_bytes

    def teardown(self):
        if hasattr(self, "world"):
            self.world.close()
            self.folder.cleanup()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=thorough(25, 12), stateful_step_count=40)


def test_what_no_tier_can_have_is_not_missing_there():
    """A namespace without bytes to hash has no keys: only the pool knows its texts."""
    world, namespace = World(), object()
    for name in ("a", "b"):
        world.begin(name, list(range(3 * SIZE)), namespace)
        world.end(name)
    assert world.manager.coordinator.prefixes.stats.found_tokens == 2 * SIZE
    assert world.tiers.num_missing == 0
    world.tiers.close()


def test_records_behind_one_that_turns_out_to_be_missing_are_not_used():
    world = World()
    prefix = world.store.prefix(key_of(list(range(4 * SIZE))), None, SIZE * TOKEN_BYTES)
    world.store.save(prefix, [1, 2, 3, 4], 0)
    wanted = world.store.wanted(prefix, 0, 4)
    del world.tiers.host.records[prefix.keys[3]]  # since it was wanted
    assert [record.key for record in world.store.find(wanted, read_disk=True)] == prefix.keys[1:3]
    world.tiers.close()
