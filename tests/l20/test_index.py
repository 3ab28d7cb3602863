"""Lesson 20. Exact routing: an index that follows each replica's events, and lesson 13's score over it."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from mini_engine.agents.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, EventLog, short_hash
from mini_engine.agents.index import BlockIndex, ExactScore
from mini_engine.distributed.routing.keys import block_keys
from mini_engine.distributed.routing.policy import PrefixScore
from mini_engine.kv.prefixes import Stored
from mini_engine.kv.radix_node import key_of

SIZE = 4


def batch(*events, ts=1.0, source=b"one"):
    return EventBatch(ts, list(events), 0, source)


def stored(*hashes, parent=None):
    return BlockStored(list(hashes), parent, [0] * SIZE * len(hashes), SIZE)


def keys_of(*names):
    """Return lesson 13's keys of a prompt, a block per name."""
    return block_keys([name for name in names for _ in range(SIZE)], None, SIZE)


def test_a_block_that_is_stored_again_after_its_removal_is_known():
    index = BlockIndex()
    index.apply("a", 0, batch(stored(1), BlockRemoved([1]), stored(1)))
    assert index.matched("a", [1]) == 1, "events count in their order, within a batch as well"


def test_batches_of_a_publisher_without_an_id_count_once():
    """A replay overlaps with what arrives meanwhile. `test_exact.py` has publishers with an id."""
    index = BlockIndex()
    first = batch(stored(1), ts=1.0, source=None)
    index.apply("a", 0, first)
    index.apply("a", 1, batch(BlockRemoved([1]), ts=2.0, source=None))
    assert index.apply("a", 0, first) is None
    assert index.num_blocks("a") == 0, "batch 0 had been applied; a second time it would bring back a removed block"


def test_clearing_within_a_batch_does_not_excuse_a_gap():
    index = BlockIndex()
    index.apply("a", 0, batch(stored(1)))
    assert index.apply("a", 2, batch(stored(2), AllBlocksCleared())) == 1, "only a batch that begins so is a snapshot"


def test_a_restarted_replica_without_an_id_gives_itself_away_by_an_old_number_in_a_newer_batch():
    index = BlockIndex()
    for number in range(5):
        index.apply("a", number, batch(stored(number), ts=float(number), source=None))
    assert index.apply("a", 0, batch(stored(8), ts=9.0, source=None)) is None
    assert index.matched("a", [8]) == 1, "a small number is no repetition here: the replica was restarted"
    assert index.num_blocks("a") == 1, "its cache was empty when it started"


def test_a_restart_seen_late_is_a_gap():
    index = BlockIndex()
    index.apply("a", 0, batch(stored(1)))
    assert index.apply("a", 2, batch(stored(2), source=b"two")) == 0, "replay the new start's batches from 0"
    assert index.num_blocks("a") == 0, "what the earlier start had is gone, whatever is still missing"


def test_a_forgotten_replica_goes_on_with_what_it_stores_from_then_on():
    index = BlockIndex()
    index.apply("a", 0, batch(stored(1)))
    index.forget("a", 5, b"one")
    assert index.matched("a", [1]) == 0
    assert index.apply("a", 5, batch(BlockRemoved([1]), stored(2))) is None
    assert index.matched("a", [2]) == 1


def filled(*texts):
    """Return an index of replicas 0, 1, …, each with the blocks of one text, by way of a real log."""
    index = BlockIndex()
    for replica, names in enumerate(texts):
        log = EventLog(SIZE)
        if names:
            tokens = [name for name in names for _ in range(SIZE)]
            log.stored(Stored(key_of(tokens), None, list(range(1, len(names) + 1)), 0))
        index.apply(replica, 0, batch(*log.take()))
    return index


def test_an_evicted_prefix_attracts_nothing():
    """This is what a guess cannot know: the prompt was sent here, and its blocks are gone since."""
    index = BlockIndex()
    index.apply(0, 0, batch(stored(*map(short_hash, keys_of(1, 2)))))
    index.apply(1, 0, batch())
    policy = ExactScore(index)
    policy.sent(0, keys_of(1, 2))
    policy.found(0, keys_of(1, 2), 0)
    index.apply(0, 1, batch(BlockRemoved([short_hash(key) for key in keys_of(1, 2)])))
    assert policy.choose(keys_of(1, 2, 3), {0: 2.0, 1: 1.9}) == 1, "replica 0 is busier, and has nothing of it any more"


def test_prompts_that_arrive_together_meet_at_one_replica():
    """Events come when a prompt has been computed; until then the router remembers where it sent one."""
    policy = ExactScore(filled([], []))
    first = policy.choose(keys_of(1, 2, 3), {0: 0.0, 1: 0.0})
    policy.sent(first, keys_of(1, 2, 3))
    loads = {first: 1.0, 1 - first: 1.0}
    assert policy.choose(keys_of(1, 2, 4), loads) == first, "it will have the prefix by the time this one is computed"
    policy.found(first, keys_of(1, 2, 3), 0)
    assert not policy.coming[first], "from here on, events say what it has"


def test_two_prompts_on_their_way_are_two():
    policy = ExactScore(filled([], []))
    for _ in range(2):
        policy.sent(0, keys_of(1, 2))
    policy.found(0, keys_of(1, 2), 0)
    assert policy.coming[0].total() == 2, "the second one is still on its way"


def test_a_replica_that_is_gone_is_forgotten():
    policy = ExactScore(filled([1], []))
    policy.sent(0, keys_of(1, 2))
    policy.choose(keys_of(1), {1: 0.0})
    assert 0 not in policy.coming
    with pytest.raises(ValueError):
        policy.choose(keys_of(1), {})


TEXTS = st.lists(st.lists(st.integers(1, 3), max_size=4), min_size=2, max_size=3)


@given(TEXTS, st.lists(st.integers(1, 3), max_size=5), st.lists(st.integers(0, 4), min_size=3, max_size=3))
def test_the_score_is_lesson_13s(texts, prompt, loads):
    """Where a guess happens to be right, both routers choose the same replica."""
    given_loads = {replica: float(loads[replica]) for replica in range(len(texts))}
    guess = PrefixScore()
    guess.choose([], given_loads)
    for replica, names in enumerate(texts):
        guess.sent(replica, keys_of(*names))
    exact = ExactScore(filled(*texts))
    keys = keys_of(*prompt)
    assert exact.choose(keys, given_loads) == guess.choose(keys, given_loads)
