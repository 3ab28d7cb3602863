"""Lesson 19. The account of transfers: what a cancel frees, and what only the sender's last word or its death does."""

import pytest

from mini_engine.handover.stage import BrokenProtocol
from tests.l19.parts import transfers_of
from tests.support import must_raise


def shown(transfers, buffers):
    return [transfers.buffers.states[buffer].value for buffer in buffers]


def lent(num_filled=0, num_buffers=6):
    """Return an account with a transfer of four buffers, the first ones of which are complete."""
    transfers = transfers_of(num_buffers)
    transfer = transfers.ask(1, 0, 4, 0)
    if num_filled:
        transfers.fill(1, transfer.id, num_filled)
    return transfers, transfer


@pytest.mark.task(4)
def test_a_cancel_frees_no_buffer_that_the_sender_may_write():
    transfers, transfer = lent()
    assert transfers.cancel(transfer) is True, "the transfer was on its way, so the sender must be told"
    assert shown(transfers, transfer.buffers) == ["owed"] * 4, "it has not heard of the cancel, and may be writing now"
    assert transfers.ask(1, 0, 4, 0) is None, "two buffers are free, four are owed: too few for another prompt"


@pytest.mark.task(4)
def test_a_cancel_frees_what_was_complete():
    transfers, transfer = lent(num_filled=3)
    assert transfers.cancel(transfer) is True, "one buffer is still on its way"
    assert shown(transfers, transfer.buffers) == ["free", "free", "free", "owed"], (
        "the sender never writes into a buffer that it called complete; the fourth one is the sender's"
    )


@pytest.mark.task(4)
def test_the_sender_s_last_word_frees_what_it_was_owed():
    transfers, transfer = lent(num_filled=1)
    transfers.cancel(transfer)
    transfers.fill(1, transfer.id, 2)
    assert shown(transfers, transfer.buffers) == ["free", "owed", "owed", "owed"], "a late word changes nothing"
    transfers.end(1, transfer.id, "cancelled")
    assert shown(transfers, transfer.buffers) == ["free"] * 4, "Ended: it writes into none of them any more"
    assert dict(transfers.of_id) == {}, "nothing is left to remember of a cancelled transfer"


@pytest.mark.task(4)
def test_buffers_that_were_lent_again_are_left_to_their_new_transfer():
    transfers, transfer = lent(num_filled=2, num_buffers=4)
    transfers.cancel(transfer)
    second = transfers.ask(2, 0, 2, 0)
    assert sorted(second.buffers) == sorted(transfer.buffers[:2]), "the two complete ones were free"
    transfers.end(1, transfer.id, "cancelled")
    assert shown(transfers, second.buffers) == ["lent"] * 2, (
        "the first transfer ends for the buffers that it was owed; the others are the second transfer's by now"
    )
    assert shown(transfers, transfer.buffers[2:]) == ["free"] * 2, "the buffers that were owed"


@pytest.mark.task(4)
def test_a_dead_sender_is_owed_nothing():
    transfers, transfer = lent(num_filled=2, num_buffers=4)
    transfers.cancel(transfer)
    second = transfers.ask(2, 0, 2, 0)
    transfers.lose(1, "the worker is gone")
    assert shown(transfers, transfer.buffers[2:]) == ["free"] * 2, "dead, it writes no more"
    assert shown(transfers, second.buffers) == ["lent"] * 2, "another sender lives, and has its buffers"
    assert list(transfers.of_id) == [second.id], "the cancelled transfer is forgotten"


@pytest.mark.task(4)
def test_a_cancel_of_a_whole_transfer_needs_no_answer():
    transfers, transfer = lent(num_filled=4)
    assert transfers.cancel(transfer) is False, "the sender has filled all of it: there is nothing to tell"
    assert shown(transfers, transfer.buffers) == ["free"] * 4, "and all of it is free"
    assert dict(transfers.of_id) == {}, "nothing is left to wait for"
    transfers.end(1, transfer.id)  # its last word comes later, and is of nothing


@pytest.mark.task(4)
def test_a_cancel_of_an_ended_transfer_needs_no_answer():
    transfers, transfer = lent(num_filled=2)
    transfers.end(1, transfer.id, "out of blocks")
    assert transfers.cancel(transfer) is False, "the sender has ended: it would not answer"
    assert shown(transfers, transfer.buffers) == ["free"] * 4, "no buffer is left behind"
    assert dict(transfers.of_id) == {}, "nothing is left to wait for"


@pytest.mark.task(4)
def test_an_end_keeps_what_has_arrived():
    transfers, transfer = lent(num_filled=2)
    transfers.end(1, transfer.id, "out of blocks")
    assert shown(transfers, transfer.buffers) == ["filled", "filled", "free", "free"], (
        "two buffers are complete and can be used; the sender won't fill the other ones"
    )
    assert transfer.has_ended is True, "nothing more will come"
    assert transfer.error == "out of blocks", "the reason is kept"
    assert transfer.is_open is False, "so no request waits for it any longer"
    assert list(transfers.of_id) == [transfer.id], "it has buffers until they are taken"
    transfers.take(transfer)
    assert transfers.buffers.states.count(transfers.buffers.states[-1]) == 6, "then all six buffers are free"
    assert dict(transfers.of_id) == {}, "and the transfer is forgotten"


@pytest.mark.task(4)
def test_an_end_of_a_whole_transfer_takes_nothing_away():
    transfers, transfer = lent(num_filled=4)
    transfers.end(1, transfer.id)
    assert shown(transfers, transfer.buffers) == ["filled"] * 4, "its contents have not been read yet"
    assert transfer.has_ended is True, "the sender has done all of it"
    assert list(transfers.of_id) == [transfer.id], "it is there until it is taken"


@pytest.mark.task(4)
def test_a_lost_sender_s_transfers_end_and_no_others():
    transfers, transfer = lent(num_filled=1, num_buffers=8)
    other = transfers.ask(2, 0, 2, 0)
    assert transfers.lose(1, "prefill worker 1 has ended") == 1, "one transfer of this sender is not whole"
    assert shown(transfers, transfer.buffers) == ["filled", "free", "free", "free"], "what had arrived can be used"
    assert (transfer.has_ended, other.has_ended) == (True, False), "only the lost sender's"
    assert transfer.error == "prefill worker 1 has ended", "why it is not whole"


def test_a_lost_sender_leaves_nothing_to_compute_of_what_was_cancelled():
    transfers, transfer = lent(num_filled=1, num_buffers=8)
    whole = transfers.ask(1, 0, 2, 0)
    transfers.fill(1, whole.id, 2)
    transfers.cancel(transfer)
    assert transfers.lose(1, "prefill worker 1 has ended") == 0, "one was cancelled, the other has arrived"
    assert shown(transfers, transfer.buffers) == ["free"] * 4, "what it was owed is free"


@pytest.mark.task(4)
def test_a_cancelled_transfer_stays_known_until_it_ends():
    transfers, transfer = lent(num_filled=1)
    transfers.cancel(transfer)
    assert list(transfer.owed) == list(transfer.buffers[1:]), "what the sender may still write into"
    assert list(transfers.of_id) == [transfer.id], "its Filled and Ended are still to come, and must be understood"
    assert transfers.num_open(1) == 1, "the sender has work until it has heard of the cancel"


# ---------------------------------------------------------------- what is given


@pytest.mark.parametrize("sender, which, count", [(2, 0, 1), (1, 1, 1), (1, 0, 5), (1, 0, -1)])
def test_a_word_about_buffers_that_were_not_lent_breaks_the_protocol(sender, which, count):
    transfers, transfer = lent()
    with must_raise(BrokenProtocol, "these buffers are not the sender's"):
        transfers.fill(sender, transfer.id + which, count)
    assert shown(transfers, transfer.buffers) == ["lent"] * 4


@pytest.mark.parametrize("again", ["end", "fill"])
def test_a_transfer_that_has_ended_is_not_the_sender_s_to_speak_of(again):
    transfers, transfer = lent(num_filled=1)
    transfers.end(1, transfer.id, "out of blocks")
    other = transfers.ask(2, 0, 3, 0)
    assert other and set(other.buffers) & set(transfer.buffers), "its unfilled buffers are lent to another sender"
    with must_raise(BrokenProtocol, "a buffer would be freed, or called filled, under its new owner"):
        transfers.end(1, transfer.id) if again == "end" else transfers.fill(1, transfer.id, 4)
    assert shown(transfers, other.buffers) == ["lent"] * 3 and transfers.num_open(2) == 1


def test_a_whole_transfer_is_the_sender_s_until_it_says_that_it_has_ended():
    """The sender still computes the token behind the prompt, so it is not idle."""
    transfers, transfer = lent(num_filled=4)
    assert transfer.is_whole and transfers.num_open(1) == 1
    transfers.end(1, transfer.id)
    assert transfers.num_open(1) == 0


def test_the_count_of_filled_buffers_is_cumulative():
    transfers, transfer = lent()
    for count in (1, 3, 3, 2, 4):
        transfers.fill(1, transfer.id, count)
    assert transfer.is_whole and shown(transfers, transfer.buffers) == ["filled"] * 4
