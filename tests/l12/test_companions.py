"""Lesson 12. Several companions at once: a prefix is loaded only as far as each of them has what it needs."""

import random

import pytest

from mini_engine.tiers.companions import CompanionRecords, bytes_behind, item_key, num_each
from mini_engine.tiers.keys import Identity
from mini_engine.tiers.records import Kind
from mini_engine.tiers.store import BlockStore, Prefix
from mini_engine.tiers.tiers import Tiers
from tests.shared.tier_cells import SIZE, Cells
from tests.shared.tier_items import both

pytestmark = pytest.mark.reference
NUM_BLOCKS, WIDTH = 12, 4 * SIZE


@pytest.fixture
def filled(opened):
    """A store that has the blocks and the items of a text, and the text's prefix."""
    store = BlockStore(opened(Tiers.of_size(None, 10**6, 0)), Cells(), Identity("w", "c", "f", SIZE))
    prefix = Prefix(b"root", bytes(range(NUM_BLOCKS)) * WIDTH, WIDTH)
    items = CompanionRecords(store.tiers, both()).new("a", prefix, 0, NUM_BLOCKS, at_end=True)
    store.save(prefix, range(NUM_BLOCKS), 0, items)
    return store, prefix


def lose(store, prefix, kind, index):
    store.tiers.host.records.pop(item_key(prefix.keys[index + 1], kind), None)


def last_end(store, prefix, start):
    """Return the largest end by trying each."""
    for end in range(NUM_BLOCKS, start, -1):
        needed = [(one.kind, index) for one in both() for index in one.needed(start, end)]
        if all(item_key(prefix.keys[index + 1], kind) in store.tiers for kind, index in needed):
            return end
    return start


def test_where_one_shortens_the_prefix_the_others_are_asked_again(filled):
    """Without state 11, 11 blocks; there window 9 is missing, so 9; there state 8 is missing, so 8 blocks."""
    store, prefix = filled
    for kind, index in ((Kind.STATE, 11), (Kind.WINDOW, 9), (Kind.STATE, 8)):
        lose(store, prefix, kind, index)
    records = CompanionRecords(store.tiers, both())
    assert records.last_end(prefix, 0, NUM_BLOCKS) == 8
    wanted = records.wanted(prefix, 0, store.asked(prefix, 0, NUM_BLOCKS))
    assert [one.kind for one in wanted] == [Kind.KV] * 8 + [Kind.STATE] + [Kind.WINDOW] * 3


@pytest.mark.parametrize("seed", range(30))
def test_the_prefix_is_the_longest_that_all_can_go_on_after(filled, seed):
    chance, (store, prefix) = random.Random(seed), filled
    for kind in (Kind.STATE, Kind.WINDOW):
        for index in chance.sample(range(NUM_BLOCKS), chance.randrange(NUM_BLOCKS)):
            lose(store, prefix, kind, index)
    for companions in (both(), both()[::-1]):
        records = CompanionRecords(store.tiers, companions)
        for start in range(NUM_BLOCKS):
            assert records.last_end(prefix, start, NUM_BLOCKS) == last_end(store, prefix, start)


def test_each_companion_gets_its_own_items_back(filled):
    store, prefix = filled
    companions = both()
    records = CompanionRecords(store.tiers, companions)
    wanted = records.wanted(prefix, 4, store.asked(prefix, 4, 9))
    found = records.useful(wanted, store.find(wanted, read_disk=False))
    records.write("b", 4, 9, [record for record in found if record.kind is not Kind.KV])
    for one, indices in zip(companions, ([8], [6, 7, 8]), strict=True):
        one.check(indices)
    assert not records.useful(wanted, found[:-1]), "without one item, nothing is of use"


def test_what_comes_with_blocks_is_counted_for_all():
    companions = both()
    assert bytes_behind(companions) == 7 + 3 * 5
    assert num_each(companions) == 3 and num_each(()) == 1
    companions[0].only_at_end = True
    assert num_each(companions) == 2, "a state comes with few blocks"
