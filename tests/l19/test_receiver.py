"""Lesson 19. The receiver asks once, waits in the queue and not in a step, and uses what has arrived."""

import gc
from types import SimpleNamespace

import pytest

from mini_engine.handover.protocol import Ask, Cancel
from mini_engine.handover.transfers import Transfer
from mini_engine.kv.cache_coordinator import coordinated
from mini_engine.kv.connector import NO_MATCH
from mini_engine.kv.prefix_cache import PrefixCache
from tests.l19.parts import Receiver, StateOfText, block_of
from tests.shared.tier_cells import BLOCKS, SIZE

TEXT = list(range(50, 50 + 4 * SIZE + 1))  # four blocks, and the token that is computed here


class Usable(Receiver):
    """A receiver whose `_usable`, task 6, says that five tokens can be used."""

    def __init__(self, **options):
        super().__init__(**options)
        self.asked_about = []
        self.connector._usable = self.usable

    def usable(self, transfer, num_computed_tokens):
        self.asked_about.append((transfer, num_computed_tokens))
        return SimpleNamespace(num_tokens=5)

    @property
    def transfer(self):
        [transfer] = self.transfers.of_id.values()
        return transfer


# ---------------------------------------------------------------- task 5: ask, wait, say what has arrived


@pytest.mark.task(5)
def test_a_prompt_is_asked_for_and_waits():
    receiver = Usable()
    found = receiver.matched(TEXT)
    [ask] = receiver.senders.sent
    assert isinstance(ask, Ask) and list(ask.tokens) == TEXT, "a sender gets the prompt"
    assert found.load_async is True, "its K and V are on their way: the request waits in the queue"
    assert found.num_tokens == 4 * SIZE, "four blocks have been asked for"


@pytest.mark.parametrize(("length", "num_computed"), [(1, 0), (SIZE, 0), (4 * SIZE + 1, 4 * SIZE)])
def test_a_prompt_without_a_whole_block_to_hand_over_is_not_asked_for(length, num_computed):
    """Also where prompts of any length may be: `min_tokens` is 0."""
    receiver = Receiver(min_tokens=0)
    assert receiver.matched(TEXT[:length], num_computed=num_computed) == NO_MATCH
    assert receiver.senders.sent == [] and not receiver.transfers.of_id


@pytest.mark.task(5)
def test_a_prompt_is_asked_for_once():
    receiver = Usable()
    for _ in range(3):
        assert receiver.matched(TEXT).load_async is True, "still on its way"
    assert len(receiver.senders.sent) == 1, "the manager asks at each step; the sender is told once"
    assert receiver.transfers.buffers.count(receiver.transfers.buffers.states[0]) == 4, "so four buffers are lent"


@pytest.mark.task(5)
def test_no_step_waits_while_other_requests_run():
    receiver = Usable()
    for _ in range(3):
        receiver.matched(TEXT, may_wait=False)
    assert receiver.num_waits == 0, "running requests want their next tokens: may_wait is False, so answer at once"


@pytest.mark.task(5)
def test_where_no_other_request_runs_it_waits_for_news():
    receiver = Usable()
    assert receiver.matched(TEXT, may_wait=True).load_async is True, "no news: the request stays in the queue"
    assert receiver.num_waits == 1, "once: an abort must not wait longer, and the processor should not spin meanwhile"


@pytest.mark.task(5)
def test_what_arrives_meanwhile_is_used_at_once():
    receiver = Usable()
    receiver.while_waiting = lambda: receiver.fill(receiver.transfer, 4)
    found = receiver.matched(TEXT, may_wait=True)
    assert found.load_async is False, "the transfer became whole during the wait: look again afterwards"
    assert found.num_tokens == 5, "what `_usable` says"


@pytest.mark.task(5)
def test_a_whole_transfer_waits_for_nothing():
    receiver = Usable()
    receiver.matched(TEXT)
    receiver.fill(receiver.transfer, 4)
    found = receiver.matched(TEXT, num_computed=SIZE, may_wait=True)
    assert found.load_async is False, "everything has arrived: the request can begin"
    assert found.num_tokens == 5, "how much of it can be used, `_usable` knows"
    assert receiver.asked_about == [(receiver.transfer, SIZE)], "after the tokens that the pool has now"
    assert receiver.num_waits == 0, "there is no news to wait for"


@pytest.mark.task(5)
def test_half_a_transfer_is_still_on_its_way():
    receiver = Usable()
    receiver.matched(TEXT)
    receiver.fill(receiver.transfer, 2)
    found = receiver.matched(TEXT)
    assert found.load_async is True, "two of four buffers are complete, and more will come: wait"
    assert found.num_tokens == 4 * SIZE, "it will have all four blocks"


@pytest.mark.task(5)
def test_an_ended_transfer_has_what_has_arrived():
    receiver = Usable()
    receiver.matched(TEXT)
    receiver.fill(receiver.transfer, 2)
    receiver.transfer.has_ended = True
    found = receiver.matched(TEXT, may_wait=True)
    assert found.load_async is False, "its sender has ended it: no more will come, so the rest is computed here"
    assert found.num_tokens == 5, "what `_usable` says"
    assert receiver.num_waits == 0, "waiting does not help"


@pytest.mark.task(5)
@pytest.mark.parametrize(
    ("namespace", "min_tokens", "num_senders"),
    [(None, 100, 1), (None, 0, 0), (object(), 0, 1)],
    ids=["too short", "no sender", "a namespace that no other process knows"],
)
def test_what_is_computed_here_does_not_wait(namespace, min_tokens, num_senders):
    receiver = Usable(min_tokens=min_tokens, num_senders=num_senders)
    for _ in range(2):
        assert receiver.matched(TEXT, namespace, may_wait=True) == NO_MATCH, "asked[key] is None: it is computed here"
    assert receiver.senders.sent == [], "no sender is asked"
    assert receiver.num_waits == 0, "and nothing is waited for"


@pytest.mark.task(5)
def test_what_is_computed_here_is_decided_once():
    receiver = Usable(num_senders=0)
    receiver.matched(TEXT)
    receiver.senders.number = 1
    assert receiver.matched(TEXT) == NO_MATCH, "asked[key] is None: decided, though a worker is back meanwhile"
    assert receiver.senders.sent == [], "no sender is asked for what is computed here"
    assert receiver.connector.stats[0].events["fallbacks"] == 1, "one prompt, however often it is looked at"


@pytest.mark.task(5)
def test_the_same_text_in_another_namespace_is_another_text():
    receiver = Usable()
    receiver.matched(TEXT, "alice")
    receiver.fill(receiver.transfer, 4)
    assert receiver.matched(TEXT, "bob").load_async is True, "bob's K and V must not be alice's: ask for his own"
    assert [ask.namespace for ask in receiver.senders.sent] == ["alice", "bob"], "a sender keeps them apart, too"


@pytest.mark.task(5)
def test_one_token_more_is_another_text():
    receiver = Usable()
    receiver.matched(TEXT)
    receiver.fill(receiver.transfer, 4)
    receiver.matched([*TEXT, 1, 2, 3])
    assert len(receiver.senders.sent) == 2, "a transfer belongs to all tokens of its prompt"


@pytest.mark.task(5)
def test_a_prompt_without_buffers_waits_for_some():
    receiver = Usable(num_buffers=6)
    receiver.matched(TEXT)
    other = [token + 1 for token in TEXT]
    found = receiver.matched(other)
    assert found.load_async is True, "four of six buffers are lent and will come back: wait for them, and ask later"
    assert len(receiver.senders.sent) == 1, "nothing can be asked for without buffers"
    assert receiver.num_waits == 0, "no waiting inside a step"
    first = receiver.transfer
    receiver.fill(first, 4)
    receiver.transfers.take(first)
    assert receiver.matched(other).load_async is True, "there are buffers now: it is asked for"
    assert len(receiver.senders.sent) == 2, "the second prompt has been asked for"


@pytest.mark.task(5)
def test_a_prompt_is_computed_here_if_no_buffer_will_come_back():
    receiver = Usable(num_buffers=6)
    receiver.matched(TEXT)
    receiver.fill(receiver.transfer, 4)
    assert receiver.matched([token + 1 for token in TEXT]) == NO_MATCH, (
        "the buffers are full, and are taken once the first request begins: it may be waiting behind this one"
    )


@pytest.mark.task(5)
def test_blocks_that_the_pool_has_are_not_asked_for():
    receiver = Usable()
    receiver.matched(TEXT, num_computed=SIZE)
    [ask] = receiver.senders.sent
    assert (ask.start, ask.stop) == (1, 4), "block 0 is cached here"
    assert len(ask.buffers) == 3, "a buffer for each of the others"


@pytest.mark.task(5)
def test_the_last_token_is_computed_here():
    receiver = Usable()
    receiver.matched(TEXT[:-1])
    [ask] = receiver.senders.sent
    assert ask.stop == 3, "16 tokens are four blocks, but the last token's logits are needed: three are handed over"


# ---------------------------------------------------------------- task 6: what has arrived


def usable(num_computed=0, num_filled=4, start=0, stop=4, num_extra=0, has_ended=True):
    """Return the first and last block that can be used of a transfer, and how many tokens they are."""
    receiver = Receiver(extras=StateOfText() if num_extra else None)
    buffers = list(range(stop - start + num_extra))
    transfer = Transfer(1, 1, start, stop, buffers, num_filled=num_filled, has_ended=has_ended)
    found = receiver.connector._usable(transfer, num_computed)
    return (found.start, found.stop) if found.num_tokens else None, found.num_tokens


@pytest.mark.task(6)
def test_all_of_a_whole_transfer_can_be_used():
    assert usable() == ((0, 4), 4 * SIZE), "four blocks from the start"


@pytest.mark.task(6)
def test_what_arrived_before_the_sender_ended_can_be_used():
    assert usable(num_filled=3) == ((0, 3), 3 * SIZE), "three of four blocks are complete; the rest is computed here"
    assert usable(num_filled=0) == (None, 0), "nothing is complete"


@pytest.mark.task(6)
def test_blocks_that_the_pool_has_by_now_are_skipped():
    assert usable(num_computed=2 * SIZE) == ((2, 4), 2 * SIZE), "the tree has grown by two blocks: begin after them"
    assert usable(num_computed=2 * SIZE, num_filled=3) == ((2, 3), SIZE), "of blocks 0 … 2, one is new"


@pytest.mark.task(6)
def test_a_pool_that_has_more_than_arrived_uses_nothing():
    assert usable(num_computed=4 * SIZE) == (None, 0), "the tree has all four blocks"
    assert usable(num_computed=3 * SIZE, num_filled=2) == (None, 0), "the tree has more than has arrived"
    assert usable(num_computed=6 * SIZE)[1] == 0, "never less than nothing"


@pytest.mark.task(6)
def test_blocks_behind_a_gap_cannot_be_used():
    assert usable(num_computed=SIZE, start=2, stop=4, num_filled=2) == (None, 0), (
        "blocks 2 and 3 have arrived, but the tree has given up block 1 meanwhile: it must be computed first"
    )
    assert usable(num_computed=2 * SIZE, start=2, stop=4, num_filled=2) == ((2, 4), 2 * SIZE), "here is no gap"


@pytest.mark.task(6)
def test_without_its_state_no_block_can_be_used():
    assert usable(num_filled=4, num_extra=1) == (None, 0), (
        "four blocks without the state at their end: a hybrid's next token needs both"
    )
    assert usable(num_filled=5, num_extra=1) == ((0, 4), 4 * SIZE), "the state is no block: four blocks are to be used"


@pytest.mark.task(6)
def test_a_state_is_good_behind_blocks_that_the_pool_has():
    assert usable(num_computed=3 * SIZE, num_filled=5, num_extra=1) == ((3, 4), SIZE), "the state after block 3"
    assert usable(num_computed=4 * SIZE, num_filled=5, num_extra=1) == (None, 0), "nothing is left to load"


@pytest.mark.task(6)
def test_the_right_buffers_are_copied_into_the_right_blocks():
    receiver = Receiver(extras=StateOfText())
    transfer = receiver.transfers.ask(1, 1, 4, 1)
    receiver.fill(transfer, 3, tokens=TEXT)
    receiver.stage.write(transfer.buffers[3], bytes(receiver.stage.buffer_bytes - 1) + b"\1")
    receiver.transfers.fill(1, transfer.id, 4)
    receiver.connector._usable(transfer, 2 * SIZE).into("a", [9, 6])
    held = lambda block: receiver.cells.slots[block * SIZE : (block + 1) * SIZE].tolist()  # noqa: E731
    assert held(9) == block_of(TEXT, 2), "the tree has blocks 0 and 1, so block 2 goes into the request's first new one"
    assert held(6) == block_of(TEXT, 3), "and block 3 into the next"
    [(name, start, stop, extras)] = receiver.extras.writes
    assert (name, start, stop) == ("a", 2, 4), "the extras are of the blocks that are loaded"
    assert [extra[-1] for extra in extras] == [1], "the buffer after the blocks' is the state"


# ---------------------------------------------------------------- with a manager


class World(Receiver):
    """A manager over a receiver's connector."""

    def __init__(self, **options):
        super().__init__(**options)
        self.manager = coordinated(BLOCKS, SIZE, self.cells.copy, prefixes=PrefixCache, connector=self.connector)
        self.requests = []

    def add(self, name, tokens, namespace=None):
        self.requests.append(Request(name, list(tokens), namespace))
        self.connector.request_added(self.requests[-1])

    def waits(self, tokens=TEXT):
        return self.manager.cost(tokens, len(tokens)).should_wait

    def states(self):
        return sorted({state.value for state in self.transfers.buffers.states})

    def kv(self, name, num_tokens):
        blocks = self.manager.tables[name].blocks
        return [self.cells.slots[blocks[i // SIZE] * SIZE + i % SIZE] for i in range(num_tokens)]


class Request:
    def __init__(self, name, token_ids, namespace):
        self.id, self.token_ids, self.namespace = name, token_ids, namespace


def sent(world, kind):
    return [message for message in world.senders.sent if isinstance(message, kind)]


def arrive(world, num_buffers=4):
    """Fill what was asked for last."""
    ask = sent(world, Ask)[-1]
    world.fill(world.transfers.of_id[ask.id], num_buffers, tokens=TEXT)


def test_a_request_that_ends_while_it_waits_is_cancelled():
    world = World()
    world.add("a", TEXT)
    assert world.waits()
    arrive(world, 1)
    world.manager.free("a")
    asked = [ask.id for ask in sent(world, Ask)]
    assert [cancel.id for cancel in sent(world, Cancel)] == asked, "its sender is told, or computes on in vain"
    assert world.states() == ["free", "owed"] and not world.connector.asked
    world.transfers.end(1, sent(world, Ask)[0].id, "cancelled")
    assert world.states() == ["free"] and not world.transfers.of_id


def test_a_twin_s_transfer_is_asked_for_again_after_a_cancel():
    world = World()
    world.add("a", TEXT)
    world.add("twin", TEXT)
    assert world.waits()
    world.manager.free("a")
    world.transfers.end(1, 1, "cancelled")
    assert world.waits() and len(sent(world, Ask)) == 2
    arrive(world)
    assert not world.waits() and world.manager.allocate("twin", TEXT) == 4 * SIZE


def test_what_arrived_in_part_is_used_and_counted():
    world = World()
    assert world.waits()
    arrive(world, 3)
    world.transfers.lose(1, "prefill worker 1 has ended")
    assert not world.waits() and world.manager.allocate("a", TEXT) == 3 * SIZE
    [stats] = world.connector.stats
    assert stats.events["fallbacks"] == 1 and stats.events["bytes"] == 3 * world.stage.buffer_bytes
    assert world.states() == ["free"] and not world.transfers.of_id


def test_requests_are_not_kept_alive():
    world = World()
    world.add("a", TEXT)
    world.requests.clear()
    gc.collect()
    assert len(world.connector.requests) == 0


@pytest.mark.parametrize(("num_filled", "cancelled"), [(0, 1), (2, 1), (4, 0)])
def test_what_ends_while_it_waits_is_counted_unless_all_has_arrived(num_filled, cancelled):
    world = World()
    world.add("a", TEXT)
    assert world.waits()
    arrive(world, num_filled)
    world.manager.free("a")
    assert world.connector.stats[0].events["cancelled"] == cancelled == len(sent(world, Cancel))
    assert cancelled or (world.states() == ["free"] and not world.transfers.of_id)
