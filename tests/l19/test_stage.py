"""Lesson 19. Who owns a buffer: each event is allowed in some states, and changes all of its buffers or none."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from mini_engine.handover.stage import BrokenProtocol, Buffers, Event, State, transitions
from tests.l19.parts import following, stage_of
from tests.support import must_raise

IMPOSSIBLE = [(state, event) for state in State for event in Event if following(state, event) is None]
WHY = {
    "free lend": "the sender may write into it from now on",
    "lent fill": "its block is complete, and a request waits for it",
    "lent cancel": "the sender has not heard of it: it may be writing into the buffer now",
    "lent end": "the sender writes no more into it, and no block is in it",
    "lent lose": "a dead sender writes no more into it, and no block is in it",
    "filled take": "its block has been copied out, and the sender is done with it",
    "filled cancel": "the sender is done with it, and no request wants it",
    "filled end": "its block is complete, and has not been read yet",
    "filled lose": "its block is complete, whatever happened to the sender later",
    "owed fill": "no request wants it, and the sender's END is still to come and will be about this buffer, too",
    "owed end": "that was the sender's last word about it, and no request wants it",
    "owed lose": "a dead sender writes no more into it, and no request wants it",
}


def shown(buffers):
    return [state.value for state in buffers.states]


# ---------------------------------------------------------------- the table


class OneBuffer(RuleBasedStateMachine):
    """A buffer on loan between two ends that keep to the protocol. What they say arrives as late as hypothesis likes.

    The student's table follows it from state to state; `true` is the state by what has happened.
    """

    def __init__(self):
        super().__init__()
        self.table, self.state, self.true, self.wire, self.is_senders = transitions(), State.FREE, State.FREE, [], False

    def hear(self, event, true):
        before, got = self.state.value, self.table.get((self.state, event))
        why = f"{before} and {event.value}: {WHY[f'{before} {event.value}']}"
        assert got is not None, f"the table has no {why}"
        assert got.value == true.value, why
        self.state = self.true = true
        if true is State.FREE:
            self.wire, self.is_senders = [], False  # later words are not about this buffer any more

    @precondition(lambda self: self.true is State.FREE)
    @rule()
    def lend(self):
        self.is_senders = True
        self.hear(Event.LEND, State.LENT)

    @precondition(lambda self: self.true in (State.LENT, State.FILLED))
    @rule()
    def cancel(self):
        self.hear(Event.CANCEL, State.OWED if self.true is State.LENT else State.FREE)

    @precondition(lambda self: self.true is State.FILLED)
    @rule()
    def take(self):
        self.hear(Event.TAKE, State.FREE)

    @precondition(lambda self: self.is_senders)
    @rule(last=st.sampled_from([Event.END, Event.LOSE]), is_filled=st.booleans(), ends=st.booleans())
    def sender_says(self, last, is_filled, ends):
        """FILL, once, or its last word, or both."""
        self.wire += [Event.FILL] * (is_filled and Event.FILL not in self.wire and self.true is not State.FILLED)
        self.wire += [last] * ends
        self.is_senders = not ends

    @precondition(lambda self: self.wire)
    @rule()
    def word_arrives(self):
        word = self.wire.pop(0)
        if word is Event.FILL:
            self.hear(word, State.FILLED if self.true is State.LENT else State.OWED)
        else:
            self.hear(word, State.FILLED if self.true is State.FILLED else State.FREE)


@pytest.mark.task(1)
def test_the_table_follows_a_buffer_whatever_crosses_on_the_way():
    run_state_machine_as_test(OneBuffer, settings=settings(max_examples=100, stateful_step_count=20))


@pytest.mark.task(1)
@pytest.mark.parametrize(("state", "event"), IMPOSSIBLE, ids=[f"{s.value} and {e.value}" for s, e in IMPOSSIBLE])
def test_what_cannot_occur_is_not_in_the_table(state, event):
    got = transitions().get((state, event))
    assert got is None, f"no end that keeps to the protocol causes {event.value} of a buffer that is {state.value}"


# ---------------------------------------------------------------- buffers


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
        after = [following(State(model[buffer]), event) for buffer in sorted(some)]
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
