"""Lesson 19. The sender copies what its engine computes, chunk by chunk, and says so afterwards."""

from types import SimpleNamespace

import pytest

from mini_engine.handover.protocol import Ended, Filled
from mini_engine.kv.connector import NO_MATCH
from mini_engine.kv.prefixes import Stored
from tests.l19.parts import SIZE, Sender, StateOfText, block_of

TEXT = list(range(50, 50 + 4 * SIZE + 1))  # four blocks, and the token that the receiver computes


def asked(start=0, stop=4, buffers=(5, 2, 7, 0), extras=None):
    """Return a sender that was asked for these blocks of TEXT, and the blocks of its pool that hold all four."""
    sender = Sender(extras=extras)
    blocks = sender.compute(TEXT, 4)
    sender.begin(TEXT, start, stop, list(buffers))
    return sender, blocks


def filled(sender):
    """Return the cumulative counts that the sender said."""
    return [message.num_buffers for message in sender.said if isinstance(message, Filled)]


def copied(sender, buffers):
    return [sender.buffer(number) for number in buffers]


@pytest.mark.task(3)
def test_each_chunk_s_blocks_are_copied_while_the_rest_is_computed():
    sender, blocks = asked()
    sender.connector._copy("7", blocks[:2], False)
    assert copied(sender, [5, 2]) == [block_of(TEXT, 0), block_of(TEXT, 1)], "two blocks are full: copy them now"
    assert filled(sender) == [2], "say that the first two buffers are complete"
    sender.connector._copy("7", blocks, False)
    assert copied(sender, [5, 2, 7, 0]) == [block_of(TEXT, i) for i in range(4)], "and the next two, into their buffers"
    assert filled(sender) == [2, 4], "the count is of all buffers that are complete, not of the new ones"


@pytest.mark.task(3)
def test_a_buffer_is_complete_before_the_receiver_is_told():
    sender, blocks = asked()
    sender.connector._copy("7", blocks, False)
    [seen] = sender.seen
    assert [seen[number] for number in [5, 2, 7, 0]] == [block_of(TEXT, i) for i in range(4)], (
        "the receiver may read the buffers as soon as it hears Filled: copy first, say it then"
    )


@pytest.mark.task(3)
def test_what_was_copied_is_not_copied_again():
    sender, blocks = asked()
    sender.connector._copy("7", blocks[:2], False)
    for number in (5, 2):
        sender.stage.write(number, bytes(sender.stage.buffer_bytes))
    sender.connector._copy("7", blocks[:3], False)
    assert copied(sender, [5, 2]) == [[0] * SIZE] * 2, "the receiver may have read these buffers: copy only what is new"
    assert copied(sender, [7]) == [block_of(TEXT, 2)], "block 2 is new"


@pytest.mark.task(3)
def test_nothing_new_is_not_worth_a_word():
    sender, blocks = asked()
    sender.connector._copy("7", [], False)
    assert sender.said == [], "no block is full yet"
    sender.connector._copy("7", blocks[:2], False)
    sender.connector._copy("7", blocks[:2], False)
    sender.connector._copy("7", blocks[:1], True)
    assert filled(sender) == [2], "a preempted request computes its first blocks again: the buffers have them already"


@pytest.mark.task(3)
def test_the_first_buffer_holds_the_first_block_that_was_asked_for():
    sender, blocks = asked(1, 4, [3, 4, 6])
    sender.connector._copy("7", blocks[:1], False)
    assert sender.said == [], "the receiver has block 0, and asked for blocks 1 … 3"
    sender.connector._copy("7", blocks[:3], False)
    assert copied(sender, [3, 4]) == [block_of(TEXT, 1), block_of(TEXT, 2)], "buffer 3 is block 1's"
    sender.connector._copy("7", blocks, False)
    assert copied(sender, [3, 4, 6]) == [block_of(TEXT, i) for i in (1, 2, 3)], "then block 3"
    assert filled(sender) == [2, 3], "buffers are counted, not blocks of the prompt"


@pytest.mark.task(3)
def test_blocks_behind_the_last_one_are_not_copied():
    sender, blocks = asked(0, 2, [5, 2])
    sender.connector._copy("7", blocks, False)
    assert copied(sender, [5, 2]) == [block_of(TEXT, 0), block_of(TEXT, 1)], "two blocks were asked for"
    assert filled(sender) == [2], "and two buffers were lent: there is no third"


@pytest.mark.task(3)
def test_a_request_without_a_transfer_is_left_alone():
    sender = Sender()
    blocks = sender.compute(TEXT, 4)
    sender.connector._copy("7", blocks, True)
    assert sender.said == [], "no buffers were lent for this request"
    sender.begin(TEXT, 0, 4, [5, 2, 7, 0])
    sender.connector.end(7, "cancelled")
    sender.connector._copy("7", blocks, True)
    assert filled(sender) == [], "after Ended, the buffers are the receiver's again"
    assert copied(sender, [5, 2, 7, 0]) == [[0] * SIZE] * 4, "they may be another request's by now"


@pytest.mark.task(3)
def test_two_requests_fill_their_own_buffers():
    sender = Sender()
    other = [9] * len(TEXT)
    mine, theirs = sender.compute(TEXT, 4), sender.compute(other, 4, first_block=6)
    sender.begin(TEXT, 0, 2, [5, 2], transfer_id=7)
    sender.begin(other, 0, 2, [1, 6], transfer_id=8)
    sender.connector._copy("8", theirs[:2], False)
    sender.connector._copy("7", mine[:2], False)
    assert copied(sender, [5, 2]) == [block_of(TEXT, 0), block_of(TEXT, 1)], "transfer 7's buffers"
    assert copied(sender, [1, 6]) == [block_of(other, 0), block_of(other, 1)], "transfer 8's buffers"
    assert [message.id for message in sender.said] == [8, 7], "each word names its transfer"


@pytest.mark.task(3)
def test_extras_follow_the_last_block():
    sender, blocks = asked(buffers=[5, 2, 7, 0, 3], extras=StateOfText())
    sender.extras.states["7"] = 41
    sender.connector._copy("7", blocks[:2], True)
    assert sender.extras.reads == [], "the state after block 1 is not the one that was asked for"
    assert copied(sender, [7]) == [[0] * SIZE], "the third buffer is block 2's"
    sender.extras.states["7"] = 42
    sender.connector._copy("7", blocks, True)
    assert copied(sender, [3]) == [[42] * SIZE], "the last buffer is for the state after the last block"
    assert copied(sender, [5, 2, 7, 0]) == [block_of(TEXT, i) for i in range(4)], "the blocks are in front of it"
    assert filled(sender)[-1] == 5, "five buffers are complete"
    assert sender.extras.reads == [("7", 0, 4)], "the extras of blocks 0 … 3, read once"


@pytest.mark.task(3)
def test_a_state_is_read_only_where_the_request_stands_behind_the_last_block():
    sender, blocks = asked(buffers=[5, 2, 7, 0, 3], extras=StateOfText(only_at_end=True))
    sender.connector._copy("7", blocks, False)
    assert sender.extras.reads == [], "at_end is False: the state is of another token, such as the last one"
    assert filled(sender) == [4], "the blocks are complete"
    sender.extras.states["7"] = 42
    sender.connector._copy("7", blocks, True)
    assert copied(sender, [3]) == [[42] * SIZE], "now the request's state is the one after the last block"
    assert filled(sender) == [4, 5], "nothing but the extras was new"


@pytest.mark.task(3)
def test_windows_can_be_read_wherever_the_request_stands():
    sender, blocks = asked(buffers=[5, 2, 7, 0, 3], extras=StateOfText(only_at_end=False))
    sender.connector._copy("7", blocks[:3], False)
    assert sender.extras.reads == [], "the last block is missing"
    sender.connector._copy("7", blocks, False)
    assert filled(sender) == [3, 5], "only_at_end is False: the extras can be read as soon as the last block is there"


@pytest.mark.task(3)
def test_a_whole_transfer_is_left_alone():
    sender, blocks = asked(buffers=[5, 2, 7, 0, 3], extras=StateOfText())
    for _ in range(2):
        sender.connector._copy("7", blocks, True)
    assert filled(sender) == [5], "everything was said"
    assert sender.extras.reads == [("7", 0, 4)], "and read once: there is no buffer for a second one"


@pytest.mark.task(3)
def test_what_the_cache_had_is_copied_when_the_request_is_admitted():
    sender = Sender()
    table = SimpleNamespace(blocks=sender.compute(TEXT, 4))
    sender.begin(TEXT, 0, 4, [5, 2, 7, 0])
    sender.connector.update_state_after_alloc("7", table, 2 * SIZE)
    assert filled(sender) == [2], "the prefix cache had two blocks; the others of the table are not computed yet"
    sender.connector.save_kv("7", Stored(b"", None, table.blocks, 2), is_kept=False)
    assert filled(sender) == [2, 4], "the manager reports the rest"


# ---------------------------------------------------------------- what is given


def test_an_end_before_the_last_buffer_says_so():
    sender = Sender()
    sender.begin(TEXT, 0, 4, [5, 2, 7, 0])
    sender.connector.end(7, num_held=3)
    sender.connector.end(7)
    [ended] = sender.said
    assert isinstance(ended, Ended) and (ended.id, ended.num_held) == (7, 3) and ended.error, "once, with a reason"


def test_a_sender_finds_and_loads_nothing():
    sender = Sender()
    assert sender.connector.get_num_new_matched_tokens(TEXT, None, 0, True) == NO_MATCH
    assert sender.connector.start_load_kv("7", TEXT, None, 0, True).num_tokens == 0


def test_a_state_is_copied_at_once_if_the_cache_had_the_whole_prompt():
    """Nothing of it is computed any more, so no chunk will end there."""
    sender = Sender(extras=StateOfText())
    sender.extras.states["7"] = 99
    sender.begin(TEXT, 0, 2, [3, 4, 5])
    table = SimpleNamespace(blocks=sender.compute(TEXT, 2))
    sender.connector.update_state_after_alloc("7", table, 2 * SIZE)
    assert sender.buffer(5) == [99] * SIZE and filled(sender) == [3]
