"""Lesson 19. Who owns a buffer: each event is allowed in some states, and changes all of its buffers or none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.handover.stage import TRANSITIONS, BrokenProtocol, Buffers, Event, State
from tests.l19.parts import stage_of
from tests.support import must_raise

EVERY = [(state, event) for state in State for event in Event]


def in_state(state, num_buffers=3):
    """Return buffers of which number 1 is in this state and the others are free."""
    buffers = Buffers(num_buffers)
    buffers.states[1] = state
    if state is not State.FREE:
        buffers.free.remove(1)
    return buffers


def shown(buffers):
    return [state.value for state in buffers.states]


@pytest.mark.task(1)
def test_buffers_that_are_lent_are_not_lent_again():
    buffers = Buffers(3)
    first = buffers.lend(2)
    assert sorted(shown(buffers)) == ["free", "lent", "lent"], "two of three buffers have been lent"
    assert len(set(first)) == 2, "two different buffers"
    second = buffers.lend(1)
    assert len(set(first) | set(second)) == 3, "the third buffer was free; the first two belong to a sender"


@pytest.mark.task(1)
def test_too_few_free_buffers_lend_none():
    buffers = Buffers(3)
    buffers.lend(2)
    assert buffers.lend(2) is None, "one buffer is free: not enough, and that is no error"
    assert shown(buffers).count("free") == 1, "nothing was lent: half a prompt's buffers are of no use"
    assert len(buffers.lend(1)) == 1, "the free one can still be lent"


@pytest.mark.task(1)
@pytest.mark.parametrize(("state", "event"), EVERY, ids=[f"{state.value} and {event.value}" for state, event in EVERY])
def test_the_table_decides_what_may_happen(state, event):
    buffers = in_state(state)
    after = TRANSITIONS.get((state, event))
    if after is None:
        with must_raise(BrokenProtocol, f"{event.value} cannot happen to a buffer that is {state.value}"):
            buffers.happen(event, [1])
        assert shown(buffers)[1] == state.value, "a call that raises changes nothing"
    else:
        assert buffers.happen(event, [1]) == [1], "the buffers are returned"
        assert shown(buffers)[1] == after.value, f"after {event.value}, a buffer that was {state.value}"


@pytest.mark.task(1)
def test_an_event_that_cannot_happen_to_one_buffer_happens_to_none():
    buffers = Buffers(4)
    first, second = buffers.lend(2)
    buffers.happen(Event.FILL, [second])
    with must_raise(BrokenProtocol, "a buffer cannot be filled a second time: both ends must agree on what it holds"):
        buffers.happen(Event.FILL, [first, second])
    assert buffers.states[first].value == "lent", "check all buffers before the first one is changed"


@pytest.mark.task(1)
def test_a_cancelled_buffer_is_not_free_until_its_sender_has_ended():
    buffers = Buffers(2)
    lent = buffers.lend(2)
    buffers.happen(Event.CANCEL, lent)
    assert buffers.lend(1) is None, "the sender may be writing into a cancelled buffer now"
    buffers.happen(Event.FILL, lent[:1])
    assert buffers.lend(1) is None, "a late word of a buffer that is owed does not free it"
    buffers.happen(Event.END, lent)
    assert sorted(buffers.lend(2)) == sorted(lent), "the sender writes no more: both can be lent again"


@pytest.mark.task(1)
def test_what_is_in_a_filled_buffer_outlives_its_sender():
    buffers = Buffers(2)
    lent = buffers.lend(2)
    buffers.happen(Event.FILL, lent[:1])
    buffers.happen(Event.LOSE, lent)
    assert buffers.states[lent[0]].value == "filled", "it is complete, whatever happened to the sender later"
    assert buffers.lend(2) is None, "one buffer is free again, the other one has not been read yet"
    buffers.happen(Event.TAKE, lent[:1])
    assert sorted(buffers.lend(2)) == sorted(lent), "now both are free"


@pytest.mark.task(1)
def test_the_error_says_what_happened_to_which_buffer():
    buffers = Buffers(5)
    with must_raise(BrokenProtocol, "a free buffer cannot be filled") as caught:
        buffers.happen(Event.FILL, [3])
    for part in ("fill", "3", "free"):
        assert part in str(caught.value), "name the event, the buffer and its state"


@pytest.mark.task(1)
def test_no_buffers_can_be_lent_and_be_told_of():
    buffers = Buffers(2)
    assert buffers.lend(0) == [], "none is no error, and not None either: there were enough"
    assert buffers.happen(Event.FILL, []) == [], "nothing happens to no buffer"
    assert shown(buffers) == ["free", "free"], "and none has changed"


@pytest.mark.task(1)
@given(st.lists(st.tuples(st.sampled_from(Event), st.sets(st.integers(0, 3), min_size=1)), max_size=30))
def test_the_free_list_has_the_free_buffers_each_once(calls):
    buffers, model = Buffers(4), ["free"] * 4
    for event, some in calls:
        after = [TRANSITIONS.get((State(model[buffer]), event)) for buffer in sorted(some)]
        if None in after:
            with must_raise(BrokenProtocol, f"{event.value} cannot happen to {[model[b] for b in sorted(some)]}"):
                buffers.happen(event, sorted(some))
        else:
            buffers.happen(event, sorted(some))
            for buffer, state in zip(sorted(some), after, strict=True):
                model[buffer] = state.value
        assert shown(buffers) == model, "the states follow the table"
        free = [buffer for buffer, state in enumerate(model) if state == "free"]
        assert sorted(buffers.free) == free, "a buffer is in the free list if it is free, and only once"


# ---------------------------------------------------------------- the memory


def test_a_buffer_holds_what_was_written_into_it():
    stage = stage_of(3)
    stage.write(1, b"abc")
    assert bytes(stage.read(1)[:3]) == b"abc"
    assert bytes(stage.read(0)) == bytes(stage.buffer_bytes) == bytes(stage.read(2)), "its neighbours are untouched"


def test_a_payload_that_is_too_long_reaches_no_other_buffer():
    stage = stage_of(2)
    with pytest.raises(ValueError):
        stage.write(0, bytes(stage.buffer_bytes + 1))
