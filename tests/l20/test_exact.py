"""Lesson 20. Events in order, and an index that follows them: what a router must be able to count on."""

import pytest

from mini_engine.agents.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, EventLog, short_hash
from mini_engine.agents.index import BlockIndex
from mini_engine.distributed.routing.keys import block_keys
from mini_engine.kv.prefixes import Stored
from mini_engine.kv.radix_node import key_of
from tests.shared.trees import SIZE, tokens


def hashes(*names, namespace=None):
    """Return the hashes of a text's blocks, from the keys by which a router knows them."""
    return [short_hash(key) for key in block_keys(tokens(*names), namespace, SIZE)]


def stored(log, names, blocks, start=0, namespace=None):
    """Tell the log that the tree has these blocks of a text, and that those from `start` on are new."""
    log.stored(Stored(key_of(tokens(*names)), namespace, blocks, start))


# ---------------------------------------------------------------- events


@pytest.mark.task(6)
def test_new_blocks_are_one_event_with_the_router_s_hashes():
    log = EventLog(SIZE)
    stored(log, (1, 2), [5, 6])
    assert log.take() == [BlockStored(hashes(1, 2), None, tokens(1, 2), SIZE)], (
        "one event for both blocks; they begin a text, so they have no parent; a router looks up the same keys"
    )


@pytest.mark.task(6)
def test_only_what_is_new_is_published_behind_its_parent():
    log = EventLog(SIZE)
    stored(log, (1, 2), [5, 6])
    stored(log, (1, 2, 3, 4), [5, 6, 7, 8], start=2)
    _, event = log.take()
    assert list(event.block_hashes) == hashes(1, 2, 3, 4)[2:], "blocks 5 and 6 were published before: two are new"
    assert event.parent_block_hash == hashes(1, 2)[1], "the new blocks come behind block 6"
    assert list(event.token_ids) == tokens(3, 4), "an event has the tokens of its own blocks"


@pytest.mark.task(6)
def test_what_two_requests_store_is_published_once():
    log = EventLog(SIZE)
    stored(log, (1, 2), [5, 6])
    stored(log, (1, 2), [5, 6])
    assert len(log.take()) == 1, "a second request computed the same text, and the tree kept the first one's blocks"
    stored(log, (1, 2, 3), [5, 6, 7])
    (event,) = log.take()
    assert list(event.block_hashes) == hashes(1, 2, 3)[2:], "`start` is 0, but the log has published blocks 5 and 6"


@pytest.mark.task(6)
def test_removed_blocks_have_the_hashes_that_they_were_stored_with():
    log = EventLog(SIZE)
    stored(log, (1, 2, 3), [5, 6, 7])
    log.removed([7, 6])
    assert log.take()[1:] == [BlockRemoved(hashes(1, 2, 3)[:0:-1])], (
        "one event for both blocks; an id says nothing to others, so the event has the hashes, the text's end first"
    )


@pytest.mark.task(6)
def test_a_block_that_holds_another_text_later_has_another_hash():
    log = EventLog(SIZE)
    stored(log, (1, 2), [5, 6])
    log.removed([6])
    stored(log, (1, 3), [5, 6], start=1)
    log.removed([6])
    events = log.take()
    assert [type(event) for event in events] == [BlockStored, BlockRemoved, BlockStored, BlockRemoved], "in this order"
    assert list(events[3].block_hashes) == hashes(1, 3)[1:], "block 6 held text 3 when it was removed, and not text 2"


@pytest.mark.task(6)
def test_a_block_that_was_never_published_is_not_removed():
    log = EventLog(SIZE)
    log.removed([9])
    assert log.take() == [], "a subscriber has never heard of block 9: an event about it says nothing"


@pytest.mark.task(6)
def test_the_same_text_in_another_namespace_has_another_hash():
    log = EventLog(SIZE)
    stored(log, (1,), [5])
    stored(log, (1,), [6], namespace="tenant")
    first, second = log.take()
    assert list(second.block_hashes) == hashes(1, namespace="tenant") != list(first.block_hashes), (
        "requests of one namespace do not find another's blocks, and a router must not think so"
    )


# ---------------------------------------------------------------- the index


def batch(*events, source=b"first start", ts=1.0):
    return EventBatch(ts, list(events), None, source)


def of(names):
    """Return the event that stores a text of blocks."""
    return BlockStored(hashes(*names), None, tokens(*names), SIZE)


@pytest.mark.task(7)
def test_a_prompt_matches_up_to_the_first_block_that_is_missing():
    index = BlockIndex()
    assert index.apply("a", 0, batch(of((1, 2, 3)))) is None, "batch 0 is the first one: nothing is missing before it"
    assert index.matched("a", hashes(1, 2, 3, 4)) == 3, "three of the prompt's four blocks are there"
    index.apply("a", 1, batch(BlockRemoved(hashes(1, 2)[1:])))
    assert index.matched("a", hashes(1, 2, 3)) == 1, "block 3 is known, but a prefix ends at the gap before it"
    assert index.matched("b", hashes(1)) == 0, "nothing has been heard of replica b"


@pytest.mark.task(7)
def test_a_gap_is_reported_and_nothing_is_applied():
    index = BlockIndex()
    index.apply("a", 0, batch(of((1,))))
    missing = index.apply("a", 2, batch(of((2,))))
    assert index.matched("a", hashes(2)) == 0, (
        "batch 1 was lost on the way: it may have removed what batch 2 builds on, so batch 2 has to wait for it"
    )
    assert missing == 1, "ask the publisher for what was lost, from number 1 on"
    assert index.apply("a", 1, batch(BlockRemoved(hashes(1)))) is None, "the replay brings batch 1"
    assert index.apply("a", 2, batch(of((2,)))) is None, "and batch 2 once more"
    assert (index.matched("a", hashes(1)), index.matched("a", hashes(2))) == (0, 1), "all three in their order"


@pytest.mark.task(7)
def test_a_batch_that_comes_twice_is_applied_once():
    index = BlockIndex()
    index.apply("a", 0, batch(of((1,))))
    index.apply("a", 1, batch(BlockRemoved(hashes(1))))
    assert index.apply("a", 0, batch(of((1,)))) is None, "an old batch is no gap"
    assert index.matched("a", hashes(1)) == 0, "a replay overlaps with what is known: batch 0 would bring block 1 back"


@pytest.mark.task(7)
def test_a_snapshot_needs_nothing_that_came_before():
    index = BlockIndex()
    index.apply("a", 0, batch(of((1,))))
    assert index.apply("a", 9, batch(AllBlocksCleared(), of((2,)))) is None, (
        "the batch begins with AllBlocksCleared: whatever batches 1 to 8 said, it does not matter any more"
    )
    assert (index.matched("a", hashes(1)), index.matched("a", hashes(2))) == (0, 1), "what the snapshot says"
    assert index.apply("a", 10, batch(of((3,)))) is None, "the next number after a snapshot is the one after its own"


@pytest.mark.task(7)
def test_a_replica_that_was_restarted_has_an_empty_cache():
    index = BlockIndex()
    for number in range(3):
        index.apply("a", number, batch(of((number + 1,))))
    assert index.apply("a", 0, batch(of((7,)), source=b"second start")) is None, (
        "another publisher_id: this batch 0 is not an old one, but the first of a new start"
    )
    assert (index.matched("a", hashes(1)), index.matched("a", hashes(7))) == (0, 1), (
        "the new process has an empty cache: what the old one had is gone"
    )


@pytest.mark.task(7)
def test_a_router_that_comes_later_asks_for_the_beginning():
    index = BlockIndex()
    assert index.apply("a", 5, batch(of((1,)))) == 0, "this router has seen none of batches 0 to 4: replay from 0"
    assert index.matched("a", hashes(1)) == 0, "nothing was applied"
