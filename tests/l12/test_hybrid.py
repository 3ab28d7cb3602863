"""Lesson 12. Lesson 11's states come back with K and V, never without them."""

import random
import tempfile
from array import array
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from mini_engine.hybrid.gdn_pool import GdnPool
from mini_engine.hybrid.memory import StateMemory
from mini_engine.kv.cache_coordinator import coordinated
from mini_engine.kv.prefix_cache import PrefixCache
from mini_engine.tiers.blocks import BlockBytes
from mini_engine.tiers.companions import CompanionRecords
from mini_engine.tiers.connector import TierConnector
from mini_engine.tiers.keys import Identity
from mini_engine.tiers.records import Kind
from mini_engine.tiers.states import StateCompanion
from mini_engine.tiers.store import BlockStore, Prefix
from mini_engine.tiers.tiers import Tiers
from tests.l11.ledger import Ledger
from tests.l11.models import ask, check_nothing_is_lost, drain, greedy, hybrid
from tests.support import some_ids, thorough

FAMILY = "every fourth attends"
LENGTHS = (33, 65, 130)
NEW = 8
PROMPTS = [tuple(some_ids(length, 160, seed=length)) for length in LENGTHS]


def with_tiers(folder=None, **options):
    return hybrid(FAMILY, kv_cache_dir=folder, kv_host_bytes=2**28, kv_always=True, **options)


def answered(engine, when):
    requests = ask(engine, PROMPTS, NEW, when)
    drain(engine)
    for request in requests:
        want = greedy(FAMILY, tuple(request.prompt_ids), NEW)
        assert request.output_ids == want, (
            f"{when}: {len(request.prompt_ids)} tokens, {request.num_cached_tokens} cached"
        )
    return [request.num_cached_tokens for request in requests]


def test_evicted_states_come_back_from_host_memory():
    engine = with_tiers()
    assert answered(engine, "cold") == [0, 0, 0]
    engine.scheduler.manager.coordinator.clear()
    assert answered(engine, "from the host") == [(n - 1) // 8 * 8 for n in LENGTHS], "up to the last checkpoint"
    check_nothing_is_lost(engine)


def test_a_slot_s_bytes_are_those_of_both_states_in_every_layer():
    pool = GdnPool(2, 3, 2, 4, 6, 10, 4, dtype=torch.bfloat16, max_track_slots=1)
    states = BlockBytes(*pool.parts)
    pool.recurrent_state.normal_()
    pool.conv_state.normal_()
    before = [pool.recurrent_state.clone(), pool.conv_state.clone()]
    [payload] = map(bytes, states.read([1]))
    assert len(payload) == states.payload_bytes == 3 * (2 * 4 * 6 * 4 + 10 * 3 * 2)
    states.write([2], [payload])
    for now, then in zip((pool.recurrent_state, pool.conv_state), before, strict=True):
        assert torch.equal(now[:, 2], then[:, 1]), "what is read from a slot is what another gets"
        assert torch.equal(now[:, [0, 1, 3]], then[:, [0, 1, 3]]), "no other slot is written"
    with pytest.raises(ValueError):
        states.write([2], [payload[:-1]])


SIZE, BLOCKS, MOST = 4, 24, 80
FAMILIES = [random.Random(seed).choices(range(2), k=60) for seed in range(2)]


class LedgerBytes:
    """Lesson 11's ledger as bytes: a state is the tokens that it has seen."""

    payload_bytes = 4 * (1 + MOST)

    def __init__(self, ledger):
        self.ledger = ledger

    def read(self, slots):
        texts = [self.ledger.seen[slot] for slot in slots]
        return [array("i", [len(seen), *seen, *[0] * (MOST - len(seen))]).tobytes() for seen in texts]

    def write(self, slots, payloads):
        for slot, payload in zip(slots, payloads, strict=True):
            count, *tokens = array("i", bytes(payload))
            self.ledger.seen[slot] = tuple(tokens[:count])


class Texts:
    """A pool whose slots hold all tokens up to theirs."""

    payload_bytes = SIZE * LedgerBytes.payload_bytes

    def __init__(self):
        self.slots = {}

    def read(self, blocks):
        return [
            b"".join(self.slots.get(block * SIZE + i, b"").ljust(self.payload_bytes // SIZE) for i in range(SIZE))
            for block in blocks
        ]

    def write(self, blocks, payloads):
        width = self.payload_bytes // SIZE
        for block, payload in zip(blocks, payloads, strict=True):
            for i in range(SIZE):
                self.slots[block * SIZE + i] = bytes(payload[i * width : (i + 1) * width]).rstrip()

    def copy(self, sources, targets):
        self.write(targets, self.read(sources))


def test_a_state_is_saved_only_at_the_end_of_its_block():
    machine = HybridMachine()
    machine.start(10**7, False)
    tokens, manager, host = [1] * 13, machine.manager, machine.tiers.host
    manager.allocate("a", tokens)
    machine.alive["a"] = tokens
    machine.compute("a", 12)
    assert [record.kind for record in host.records.values()].count(Kind.STATE) == 2, "after 8 tokens, and after 12"
    host.clear()
    machine.compute("a", 1)
    assert len(host) == 0, "the state has seen 13 tokens now; the block ends after 12"
    machine.teardown()


def test_a_state_that_has_seen_more_tokens_is_not_saved_with_a_block():
    machine = HybridMachine()
    machine.start(10**7, False)
    tokens, host = [1] * 5, machine.tiers.host
    machine.manager.allocate("a", tokens)
    machine.alive["a"] = tokens
    machine.compute("a", 5)
    tokens += [0] * 8  # an answer, which the tree gets when the request ends
    machine.compute("a", 8)
    states = [record.kind for record in host.records.values()].count(Kind.STATE)
    machine.end("a")
    kinds = [record.kind for record in host.records.values()]
    assert kinds.count(Kind.KV) == 3, "all whole blocks are saved when the request ends"
    assert kinds.count(Kind.STATE) == states, "the state has seen 13 tokens by then; the block ends after 12"
    machine.teardown()


@pytest.mark.parametrize(("hosted", "is_new"), [(False, True), (True, False)])
def test_a_state_that_only_the_disk_has_is_saved_for_host_memory(hosted, is_new):
    class OnDisk(Tiers):
        def __contains__(self, key):
            return True

    tiers, ledger = OnDisk.of_size(None, 10**6, 0), Ledger(1)
    records = CompanionRecords(tiers, [StateCompanion(LedgerBytes(ledger), lambda name: [1])])
    prefix = Prefix(b"root", bytes(4 * SIZE), 4 * SIZE)
    ledger.seen[1] = (0,) * SIZE
    if hosted:
        tiers.put(records.new("a", prefix, 0, 1, True)[0][1])
    assert bool(records.new("a", prefix, 0, 1, True)) == is_new
    tiers.close()


def test_a_state_that_comes_back_is_a_checkpoint_again():
    machine = HybridMachine()
    machine.start(10**7, False)
    tokens, manager = [1] * 30, machine.manager
    manager.allocate("a", tokens)
    machine.alive["a"] = tokens
    machine.compute("a", 30)
    machine.end("a")
    manager.coordinator.clear()
    assert manager.allocate("b", tokens) == 28, "up to the prompt's last whole block"
    table, hold = manager.tables["b"], machine.memory.holds["b"]
    slot = machine.memory.checkpoints.slots.get(table.shared.node)
    assert slot is not None, "the next request needs no tier: the state that came back is a checkpoint of the tree"
    assert machine.ledger.seen[slot] == tuple(tokens[:28]), "and it has seen the tokens up to its node's end"
    assert hold.ends == [], "no place before token 28 is left to checkpoint"
    assert manager.coordinator.prefixes.stats.found_tokens == 28, "the tiers' tokens are counted once"
    machine.alive["b"] = tokens
    machine.end("b")
    machine.teardown()


@pytest.mark.parametrize("length, found", [(5, 4), (8, 4), (9, 8), (12, 8)])
def test_a_state_at_any_block_s_end_comes_back(length, found):
    machine = HybridMachine()
    machine.start(10**7, False)
    tokens, manager = [1] * length, machine.manager
    manager.allocate("a", tokens)
    machine.alive["a"] = tokens
    machine.compute("a", length)
    machine.end("a")
    manager.coordinator.clear()
    assert manager.allocate("b", tokens) == found, "up to the last whole block before the last token"
    manager.free("b")
    machine.teardown()


class HybridMachine(RuleBasedStateMachine):
    """Requests begin, compute chunks and end; blocks and checkpoints are evicted; the process starts again."""

    @initialize(host=st.sampled_from([4000, 10**7]), disk=st.booleans())
    def start(self, host, disk):
        self.folder = tempfile.TemporaryDirectory(prefix="kv-course-", ignore_cleanup_errors=True)
        self.host, self.directory = host, Path(self.folder.name) if disk else None
        self.count = 0
        self.set_up()

    def set_up(self):
        self.cells, self.ledger, self.alive = Texts(), Ledger(3, 3), {}
        store = BlockStore(Tiers.of_size(self.directory, self.host, 10**8), self.cells, Identity("w", "c", "f", SIZE))
        self.memory = StateMemory(self.ledger, SIZE, 8)
        self.ledger.checkpoints = self.memory.checkpoints
        states = StateCompanion(LedgerBytes(self.ledger), self.memory.slots_of)
        self.manager = coordinated(
            BLOCKS,
            SIZE,
            self.cells.copy,
            prefixes=partial(PrefixCache, memory=self.memory),
            connector=TierConnector(store, [states]),
        )
        self.tiers = store.tiers

    @precondition(lambda self: len(self.alive) < 3)
    @rule(family=st.sampled_from(FAMILIES), length=st.integers(1, 40), most=st.integers(1, 60))
    def serve(self, family, length, most):
        tokens = family[:length]
        cost = self.manager.cost(tokens, length)
        if cost.should_wait or cost.num_blocks > self.manager.num_free_blocks:
            return
        self.count += 1
        name = f"r{self.count}"
        found = self.manager.allocate(name, tokens)
        self.alive[name] = tokens
        seen = self.ledger.seen[self.slot_of(name)]
        assert found < length and seen == tuple(tokens[:found]), f"{found} tokens found, the state of {len(seen)}"
        self.check(name)
        self.compute(name, most)

    def slot_of(self, name):
        return self.memory.holds[name].slots[0]

    def compute(self, name, most):
        tokens, table, hold = self.alive[name], self.manager.tables[name], self.memory.holds[name]
        stop = min(len(tokens), hold.num_computed + most)
        while hold.num_computed < stop:
            end = self.memory.chunk_end(name, hold.num_computed, stop)
            if self.manager.missing_blocks(name, end) > self.manager.num_free_blocks:
                return self.end(name)
            self.manager.grow(name, end)
            for index in range(hold.num_computed, end):
                self.cells.slots[table.blocks[index // SIZE] * SIZE + index % SIZE] = bytes(
                    b + 65 for b in tokens[: index + 1]
                )
            self.ledger.advance(hold.slots[0], tokens[hold.num_computed : end])
            self.manager.commit(name, tokens, end)
            self.tiers.flush()
        self.check(name)

    @precondition(lambda self: self.alive)
    @rule(number=st.integers(0, 9), most=st.integers(1, 60))
    def go_on(self, number, most):
        self.compute(sorted(self.alive)[number % len(self.alive)], most)

    @precondition(lambda self: self.alive)
    @rule(number=st.integers(0, 9))
    def finish(self, number):
        self.end(sorted(self.alive)[number % len(self.alive)])

    @rule(count=st.integers(1, BLOCKS))
    def evict(self, count):
        self.manager.coordinator.prefixes.tree.evict(count)

    @rule()
    def restart(self):
        for name in list(self.alive):
            self.end(name)
        self.tiers.close()
        self.set_up()

    def end(self, name):
        tokens = self.alive.pop(name)
        self.manager.free(name, tokens[: self.memory.holds[name].num_computed])
        self.tiers.flush()

    def check(self, name):
        tokens, table = self.alive[name], self.manager.tables[name]
        num_computed = self.memory.holds[name].num_computed
        assert self.ledger.seen[self.slot_of(name)] == tuple(tokens[:num_computed])
        for index in range(num_computed):
            kv = self.cells.slots[table.blocks[index // SIZE] * SIZE + index % SIZE]
            assert kv == bytes(b + 65 for b in tokens[: index + 1]), (
                f"{name} reads KV that a cold run would not compute"
            )

    def teardown(self):
        if hasattr(self, "tiers"):
            self.tiers.close()
            self.folder.cleanup()


TestHybridMachine = HybridMachine.TestCase
TestHybridMachine.settings = settings(max_examples=thorough(20, 6), stateful_step_count=30)
