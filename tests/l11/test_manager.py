"""Lesson 11. The manager: where chunks end, what is checkpointed, what a prompt finds, and who owns a state."""

import pytest

from mini_engine.base.errors import OutOfBlocks
from tests.l11.ledger import admit, compute, manager, places, serve

PROMPT = list(range(100, 121))  # 21 tokens: five whole blocks of 4


@pytest.mark.task(5)
def test_a_new_request_gets_a_slot_of_zeros():
    kv = manager()
    admit(kv, "a", PROMPT)
    slot = kv.slot_of("a")
    assert 1 <= slot <= 3, "slots 1 … 3 are working slots"
    assert kv.states.log == [("reset", slot)], "a slot is zeroed when it is handed out"


@pytest.mark.task(5)
def test_two_requests_never_have_the_same_slot():
    kv = manager()
    for name in "abc":
        admit(kv, name, PROMPT)
    assert sorted(kv.slot_of(name) for name in "abc") == [1, 2, 3], "each request has a working slot of its own"
    with pytest.raises(OutOfBlocks):
        admit(kv, "d", PROMPT)
    assert "d" not in kv.tables and kv.blocks_by_state.held == 0


@pytest.mark.parametrize("most", [1, 3, 8, 11])
def test_checkpoints_fall_on_the_same_places_whatever_the_chunk_size(most):
    kv = manager()
    serve(kv, "a", PROMPT, most=most)
    assert {tokens: kv.states.seen[slot] for tokens, slot in places(kv).items()} == {
        tuple(PROMPT[:end]): tuple(PROMPT[:end]) for end in (8, 16, 20)
    }, "a checkpoint is the state after exactly the tokens up to its node's end"


def test_a_prompt_that_ends_with_a_block_is_checkpointed_a_block_earlier():
    """Its last token must be computed again, so a checkpoint behind it could not be used by the same prompt."""
    kv = manager(interval=40)
    serve(kv, "a", PROMPT[:16])
    assert places(kv).keys() == {tuple(PROMPT[:12])}
    assert serve(kv, "b", PROMPT[:16]) == 12


def test_a_match_is_as_long_as_the_deepest_checkpoint():
    kv = manager(interval=40)
    serve(kv, "a", PROMPT)
    assert serve(kv, "b", PROMPT[:13] + [1] * 9) == 0, "12 tokens have K and V, but no state leads there"
    assert serve(kv, "c", PROMPT[:13] + [2] * 9) == 12, "b was seen to leave a's prefix there, so b made a checkpoint"
    assert serve(kv, "d", PROMPT) == 20


def test_the_oldest_checkpoint_makes_room_and_its_blocks_stay():
    kv = manager(track=2)
    for start in (0, 100, 200):
        serve(kv, f"r{start}", list(range(start, start + 6)))
    assert [tokens[0] for tokens in places(kv)] == [100, 200] and kv.checkpoints.num_evicted == 1
    assert kv.tree.peek(list(range(6))).num_tokens == 4, "K and V of an evicted checkpoint's node stay"
    assert kv.findable(list(range(6))) == 0, "but no state leads there"


def test_evicted_blocks_take_their_checkpoint_along():
    kv = manager(interval=40)
    serve(kv, "a", PROMPT)
    kv.tree.evict(1)
    assert not kv.checkpoints.slots, "a node that has lost a block ends elsewhere: its state is that of more tokens"
    assert len(kv.states.free_track_slots) == 4
    assert serve(kv, "b", PROMPT) == 0


def test_a_twin_waits_for_a_checkpoint_on_its_way():
    kv = manager()
    admit(kv, "a", PROMPT)
    assert kv.cost(PROMPT, len(PROMPT)).should_wait, "a will checkpoint this very prompt"
    assert not kv.cost([1] * 21, 21).should_wait
    assert not kv.cost(PROMPT, len(PROMPT), "other namespace").should_wait
    assert not kv.cost(PROMPT[:7] + [1] * 9, 16).should_wait, "it leaves a's prompt before the first checkpoint"
    compute(kv, "a", PROMPT)
    assert not kv.cost(PROMPT, len(PROMPT)).should_wait, "now it is there"
    assert kv.cost(PROMPT, len(PROMPT)).num_blocks == 1, "five shared blocks are locked by a and cost nothing"


def test_a_request_waits_while_no_slot_is_free():
    kv = manager(slots=1)
    admit(kv, "a", PROMPT)
    assert kv.cost([1, 2, 3], 3).should_wait, "blocks are free, but a request also needs a state slot"
    kv.free("a")
    assert not kv.cost([1, 2, 3], 3).should_wait


def test_a_state_cannot_be_rolled_back():
    kv = manager()
    admit(kv, "a", PROMPT)
    compute(kv, "a", PROMPT[:10])
    kv.grow("a", 18)
    kv.truncate("a", 10)  # only room that no token has used
    with pytest.raises(ValueError):
        kv.truncate("a", 9)
    assert kv.tables["a"].num_tokens == 10 and kv.states.seen[kv.slot_of("a")] == tuple(PROMPT[:10])
