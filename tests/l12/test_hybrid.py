"""Lesson 12. Lesson 11's states come back with K and V, never without them."""

from array import array
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from mini_engine.assembly.loading import load
from mini_engine.checkpoint.shipped import shipped_checkpoint
from mini_engine.hybrid.memory import StateMemory
from mini_engine.kv.cache_coordinator import coordinated
from mini_engine.kv.prefix_cache import PrefixCache
from mini_engine.tiers.companions import CompanionRecords
from mini_engine.tiers.connector import TierConnector
from mini_engine.tiers.keys import Identity
from mini_engine.tiers.records import Kind
from mini_engine.tiers.states import StateCompanion
from mini_engine.tiers.store import BlockStore, Prefix
from mini_engine.tiers.tiers import Tiers
from tests.support import ask, check_answers, drain, some_ids, thorough
from tests.tiered import TierMachine
from tests.worlds import Ledger

LENGTHS = (33, 65, 130)
PROMPTS = [some_ids(length, 2000, seed=length) for length in LENGTHS]


def test_evicted_states_come_back_from_host_memory(engine_of):
    path = shipped_checkpoint("pocket-hybrid")
    options = dict(block_size=8, checkpoint_interval=32, kv_host_bytes=2**28, kv_always=True, num_blocks=200)
    engine = engine_of(load(path, "float32", "cpu"), **options)
    for when, expected in (("cold", [0, 0, 0]), ("from the host", [(n - 1) // 8 * 8 for n in LENGTHS])):
        requests = ask(engine, PROMPTS, 8, when)
        drain(engine)
        assert check_answers(requests, path, when) == expected, "up to the last checkpoint"
        engine.scheduler.manager.coordinator.clear()


SIZE, BLOCKS, MOST = 4, 24, 80


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


class HybridMachine(TierMachine):
    """Requests with a state: blocks and checkpoints are evicted, and the process starts again."""

    @initialize(host=st.sampled_from([4000, 10**7]), disk=st.booleans())
    def start(self, host, disk):
        self.start_tiers(host, disk)

    def set_up(self):
        self.cells, self.ledger = Texts(), Ledger(3, 3)
        store = BlockStore(Tiers.of_size(self.directory, self.host, 10**8), self.cells, Identity("w", "c", "f", SIZE))
        self.memory = StateMemory(self.ledger, SIZE, 8)
        self.ledger.checkpoints = self.memory.checkpoints
        connector = TierConnector(store, [StateCompanion(LedgerBytes(self.ledger), self.memory.slots_of)])
        cache = partial(PrefixCache, memory=self.memory)
        self.manager = coordinated(BLOCKS, SIZE, self.cells.copy, prefixes=cache, connector=connector)
        self.tiers, self.hold, self.chunk_end = store.tiers, self.memory.holds.__getitem__, self.memory.chunk_end

    @rule(count=st.integers(1, BLOCKS))
    def evict(self, count):
        self.manager.coordinator.prefixes.tree.evict(count)

    def slot(self, name, index):
        return self.manager.tables[name].blocks[index // SIZE] * SIZE + index % SIZE

    def write(self, name, tokens, start, stop):
        for index in range(start, stop):
            self.cells.slots[self.slot(name, index)] = letters(tokens[: index + 1])
        self.ledger.advance(self.hold(name).slots[0], tokens[start:stop])

    def check(self, name):
        tokens, hold = self.alive[name], self.hold(name)
        assert self.ledger.seen[hold.slots[0]] == tuple(tokens[: hold.num_computed])
        for index in range(hold.num_computed):
            kv = self.cells.slots[self.slot(name, index)]
            assert kv == letters(tokens[: index + 1]), f"{name} reads KV that a cold run would not compute"


def letters(tokens):
    return bytes(token + 65 for token in tokens)


TestHybridMachine = HybridMachine.TestCase
TestHybridMachine.settings = settings(max_examples=thorough(20, 6), stateful_step_count=30)


# ---------------------------------------------------------------- one request after another


@pytest.fixture
def machine():
    """The manager of the machine above, with room for all records in host memory."""
    machine = HybridMachine()
    machine.start(10**7, False)
    yield machine
    machine.teardown()


def count(machine, kind):
    """Return how many records of this kind host memory has."""
    return [record.kind for record in machine.tiers.host.records.values()].count(kind)


def test_a_state_is_saved_only_at_the_end_of_its_block(machine):
    machine.begin("a", [1] * 13)
    machine.compute("a", 12)
    assert count(machine, Kind.STATE) == 2, "after 8 tokens, and after 12"
    machine.tiers.host.clear()
    machine.compute("a", 1)
    assert len(machine.tiers.host) == 0, "the state has seen 13 tokens now; the block ends after 12"


def test_a_state_that_has_seen_more_tokens_is_not_saved_with_a_block(machine):
    tokens = [1] * 5
    machine.begin("a", tokens)
    machine.compute("a")
    tokens += [0] * 8  # an answer, which the tree gets when the request ends
    machine.compute("a")
    states = count(machine, Kind.STATE)
    machine.end("a")
    assert count(machine, Kind.KV) == 3, "all whole blocks are saved when the request ends"
    assert count(machine, Kind.STATE) == states, "the state has seen 13 tokens by then; the block ends after 12"


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


@pytest.mark.parametrize("length, found", [(5, 4), (8, 4), (9, 8), (12, 8), (30, 28)])
def test_a_state_that_comes_back_is_a_checkpoint_again(machine, length, found):
    tokens, manager = [1] * length, machine.manager
    machine.begin("a", tokens)
    machine.compute("a")
    machine.end("a")
    manager.coordinator.clear()
    assert machine.begin("b", tokens) == found, "up to the last whole block before the last token"
    slot = machine.memory.checkpoints.slots.get(manager.tables["b"].shared.node)
    assert slot is not None, "the next request needs no tier: the state that came back is a checkpoint of the tree"
    assert machine.ledger.seen[slot] == tuple(tokens[:found]), "and it has seen the tokens up to its node's end"
    assert machine.hold("b").ends == [], "no place before it is left to checkpoint"
    assert manager.coordinator.prefixes.stats.found_tokens == found, "the tiers' tokens are counted once"
