"""Lesson 11. Each task on its own: trees and tables made by hand, so that no other task needs to be written."""

import pytest

from mini_engine.base.errors import OutOfBlocks
from mini_engine.hybrid.checkpoints import Checkpoints
from mini_engine.hybrid.memory import StateHold
from mini_engine.kv.radix import RadixTree
from mini_engine.kv.radix_node import key_of
from tests.l11.ledger import Ledger, manager
from tests.shared.trees import refused

PROMPT = list(range(100, 121))  # 21 tokens: five whole blocks of 4


def nodes(track, count):
    """Return checkpoints and `count` nodes of a block each, none of them with one."""
    tree = RadixTree(4)
    return Checkpoints(Ledger(2, track)), [tree.insert([i, i, i, i], [i + 1]).node for i in range(count)]


@pytest.mark.task(4)
def test_a_checkpoint_takes_a_free_slot():
    kept, (one, two) = nodes(track=2, count=2)
    slots = [kept.new_checkpoint(one), kept.new_checkpoint(two)]
    assert set(slots) == {3, 4}, "return the slot that the state is to be copied into"
    assert kept.slots == {one: slots[0], two: slots[1]}, "`slots` names the slot of each node"
    assert kept.num_evicted == 0, "while a slot is free, none is evicted"


@pytest.mark.task(4)
def test_a_node_that_has_a_checkpoint_keeps_it_and_becomes_the_newest():
    kept, (one, two) = nodes(track=2, count=2)
    slot = kept.new_checkpoint(one)
    kept.new_checkpoint(two)
    assert kept.new_checkpoint(one) is None, "its state is there already, and a checkpoint is written once"
    assert kept.slots.get(one) == slot, "a node keeps the checkpoint that it has"
    names = [{one: "one", two: "two"}[node] for node in kept.slots]
    assert names == ["two", "one"], "asking for a checkpoint that is there makes it the most recently used"


@pytest.mark.task(4)
def test_the_least_recently_used_checkpoint_makes_room():
    kept, (one, two, three) = nodes(track=2, count=3)
    slot = kept.new_checkpoint(one)
    kept.new_checkpoint(two)
    assert kept.new_checkpoint(three) == slot, (
        "no slot is free: the least recently used checkpoint's must be used again"
    )
    names = [{one: "one", two: "two", three: "three"}[node] for node in kept.slots]
    assert names == ["two", "three"], "the least recently used checkpoint goes, and the new one is the newest"
    assert kept.num_evicted == 1, "one checkpoint went, and num_evicted counts it"


@pytest.mark.task(4)
def test_without_slots_there_is_no_checkpoint():
    kept, (one,) = nodes(track=0, count=1)
    assert kept.new_checkpoint(one) is None, "no slot can be had, and there is none to evict: return None"
    assert not kept.slots, "no slot can be had, so there is no checkpoint"


def keep(kv, tokens, with_state=True) -> int | None:
    """Store K and V of `tokens`, and a checkpoint at their end; return its slot."""
    blocks = kv.allocator.alloc_blocks(len(tokens) // 4)
    node = kv.tree.insert(tokens, blocks).node
    kv.allocator.free(blocks)  # from now on only the tree holds them
    if not with_state:
        return None
    slot = kv.states.alloc_track_slot()
    kv.states.seen[slot], kv.checkpoints.slots[node] = tuple(tokens), slot
    return slot


@pytest.mark.task(5)
def test_a_request_starts_from_a_copy_of_the_deepest_checkpoint():
    kv = manager()
    keep(kv, PROMPT[:8])
    deepest = keep(kv, PROMPT[:16])
    keep(kv, PROMPT[:20], with_state=False)
    assert kv.allocate("a", PROMPT) == 16, "the deepest node with a checkpoint, not the deepest with K and V"
    slot = kv.slot_of("a")
    assert 1 <= slot <= 3, "a request needs a working slot of its own: copy the checkpoint"
    assert kv.states.log[-1:] == [("copy", deepest, slot)], "copy the checkpoint's state into the slot"
    hold, table = kv.hold("a"), kv.tables["a"]
    assert hold.num_computed == 16, "go on after the tokens that the state has seen"
    assert (len(table.blocks), table.num_tokens) == (4, 16), "the blocks of these tokens are in the table"
    assert hold.ends == [20], "note where this prompt is to be checkpointed: `_ends` has the places"


def test_the_last_token_of_a_prompt_is_left_to_compute():
    kv = manager()
    keep(kv, PROMPT[:16])
    keep(kv, PROMPT[:20])
    assert kv.allocate("a", PROMPT[:20]) == 16, "20 tokens are stored; one must be computed to get logits: `_usable`"
    assert kv.tables["a"].shared.key == key_of(PROMPT[:20]), "the table's `key` has all whole blocks of the prompt"


def test_what_a_request_starts_from_is_locked_and_counted():
    kv = manager()
    keep(kv, PROMPT[:16])
    kv.allocate("a", PROMPT)
    assert kv.tree.num_protected == 4, "their 4 blocks stay locked while the request runs"
    told = kv.coordinator.prefixes.stats.asked_tokens, kv.coordinator.prefixes.stats.found_tokens
    assert told == (21, 16), "`stats` counts the lookup, as in lesson 8: 21 prompt tokens, 16 of them found"


@pytest.mark.task(5)
def test_without_a_checkpoint_a_request_starts_from_zeros():
    kv = manager()
    keep(kv, PROMPT[:12], with_state=False)
    assert kv.allocate("a", PROMPT) == 0, "12 tokens have K and V, but no state leads there"
    assert kv.hold("a").ends == [12, 20], "where it leaves what is stored, and its last whole block"
    assert kv.states.seen.get(kv.slot_of("a")) == (), "a slot is zeroed when it is handed out"
    kv.allocate("b", PROMPT, "other namespace")
    assert kv.slot_of("b") != kv.slot_of("a"), "each request has a slot of its own"


@pytest.mark.task(5)
def test_the_checkpoint_that_was_copied_counts_as_used():
    kv = manager(track=2)
    keep(kv, PROMPT[:16])
    keep(kv, [7] * 8)
    kv.allocate("a", PROMPT)
    oldest = next(iter(kv.checkpoints.slots))
    assert bytes(oldest.key) == key_of([7] * 8), (
        "a starts from the checkpoint of its prompt: the other is the least recently used one now, and goes first"
    )


def test_what_cannot_be_admitted_changes_nothing():
    kv = manager(slots=2)
    keep(kv, PROMPT[:16])
    kv.allocate("a", PROMPT)
    free = list(kv.free_slots)
    with refused("a request that has a table cannot get another: raise ValueError"):
        kv.allocate("a", PROMPT)
    assert kv.free_slots == free, "a refused call must change nothing: it has taken a slot"
    kv.allocate("b", PROMPT)
    locks = [node.locks for node in kv.checkpoints.slots]
    with pytest.raises(OutOfBlocks):
        kv.allocate("c", PROMPT)
    assert sorted(kv.tables) == ["a", "b"], "a refused call must change nothing: it has left a table"
    assert [node.locks for node in kv.checkpoints.slots] == locks, "a refused call must change nothing: it has locked"


def chunk_ends(kv, length, ends) -> list[int]:
    """Return where the chunks of a prompt of this length end, with no other limit."""
    kv.memory.holds["a"], found = StateHold([1], 0, ends), [0]
    while found[-1] < length:
        start, end = found[-1], kv.chunk_end("a", found[-1], length)
        assert end > start, f"a chunk must make progress; with ends {ends} this one goes from {start} to {end}"
        assert end <= length, f"a chunk from {start} to at most {length} ends at {end}"
        found.append(end)
    return found[1:]


@pytest.mark.task(6)
def test_chunks_end_at_intervals_and_at_the_prompt_s_own_places():
    assert chunk_ends(manager(), 21, [20]) == [8, 16, 20, 21], (
        "chunks end at every multiple of the interval, 8, and at the last whole block, 20"
    )
    assert chunk_ends(manager(), 21, [12, 20]) == [8, 12, 16, 20, 21], (
        "chunks end at every multiple of 8, counted from the text's start, and at both of `ends`, 12 and 20"
    )
    assert chunk_ends(manager(interval=40), 21, []) == [21], "no place to checkpoint: one chunk"


@pytest.mark.task(6)
def test_a_chunk_is_never_longer_than_allowed():
    kv = manager()
    chunk_ends(kv, 21, [20])
    for start, stop, end in ((3, 5, 5), (8, 21, 16), (17, 21, 20)):
        assert kv.chunk_end("a", start, stop) == end, f"a chunk from {start} to at most {stop} ends at {end}"


@pytest.mark.task(6)
def test_without_checkpoint_slots_a_chunk_is_as_long_as_allowed():
    assert chunk_ends(manager(track=0), 21, [20]) == [21], "nothing can be checkpointed, so nothing is cut"
