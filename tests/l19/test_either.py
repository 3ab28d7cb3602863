"""Lesson 19. Tiers and workers behind one manager: what the tiers have, no worker computes."""

import pytest

from mini_engine.handover.either import EitherConnector
from mini_engine.kv.cache_coordinator import coordinated
from mini_engine.kv.connector import NOTHING, KvConnector, Matched
from mini_engine.kv.prefix_cache import PrefixCache
from mini_engine.kv.prefixes import Stored
from mini_engine.kv.radix_node import key_of
from tests.l19.parts import Receiver
from tests.shared.tier_cells import BLOCKS, SIZE, digests

TEXT = list(range(50, 50 + 4 * SIZE + 1))


class Tiers(KvConnector):
    """Tiers that have a prompt's first blocks, and note what they are given."""

    def __init__(self, num_blocks=0):
        self.num_blocks, self.saved, self.kept = num_blocks, [], []

    def get_num_new_matched_tokens(self, token_ids, namespace, num_computed_tokens, may_wait):
        return Matched(self.num_blocks * SIZE)

    def start_load_kv(self, *asked):
        return NOTHING

    def save_kv(self, request_id, stored, is_kept):
        self.saved.append(stored)
        self.kept.append(is_kept)


def either(num_blocks, min_tokens):
    receiver = Receiver(min_tokens=min_tokens)
    return receiver, EitherConnector(Tiers(num_blocks), receiver.connector)


@pytest.mark.parametrize(
    ("num_blocks", "min_tokens", "is_asked"),
    [(0, 0, True), (3, 0, True), (4, 0, False), (3, SIZE, True), (3, SIZE + 1, False), (0, 4 * SIZE + 1, False)],
)
def test_a_worker_is_asked_if_enough_whole_blocks_are_missing(num_blocks, min_tokens, is_asked):
    receiver, connector = either(num_blocks, min_tokens)
    found = connector.get_num_new_matched_tokens(TEXT, None, 0, False)
    assert bool(receiver.senders.sent) == found.load_async == is_asked
    assert found.num_tokens == (4 if is_asked else num_blocks) * SIZE


@pytest.fixture
def world():
    """A receiver, tiers that have nothing, and a manager over both."""
    receiver, connector = either(0, 0)
    manager = coordinated(BLOCKS, SIZE, receiver.cells.copy, prefixes=PrefixCache, connector=connector)
    return receiver, connector, manager


def arrive(receiver, manager, num_buffers):
    """Ask for TEXT, and let that much of it arrive; return the transfer."""
    assert manager.cost(TEXT, len(TEXT)).should_wait
    [transfer] = receiver.transfers.of_id.values()
    receiver.fill(transfer, num_buffers, tokens=TEXT)
    return transfer


def test_what_a_worker_brings_goes_to_the_tiers(world):
    receiver, connector, manager = world
    arrive(receiver, manager, 4)
    assert manager.allocate("a", TEXT) == 4 * SIZE
    [stored] = connector.tiers.saved
    held = [receiver.cells.slots[block * SIZE + i] for block in stored.blocks for i in range(SIZE)]
    assert held == digests(None, TEXT)[: 4 * SIZE] and stored.start == 0 and not connector.brought
    assert connector.tiers.kept == [True], "with what goes with the last block: a state, for example"


def test_only_the_blocks_that_a_worker_brought_go_to_the_tiers(world):
    """The pool has had the first two blocks since another prompt: the tiers were given them then."""
    receiver, connector, manager = world
    manager.allocate("before", TEXT[: 2 * SIZE])
    manager.grow("before", 2 * SIZE)
    manager.commit("before", TEXT[: 2 * SIZE], 2 * SIZE)
    connector.tiers.saved.clear()
    arrive(receiver, manager, 2)
    assert manager.allocate("a", TEXT) == 4 * SIZE
    [stored] = connector.tiers.saved
    assert (stored.start, len(stored.blocks)) == (2, 4)


def test_what_has_arrived_of_a_lost_worker_s_prompt_goes_to_the_tiers_under_its_own_name(world):
    receiver, connector, manager = world
    receiver.transfers.lose(arrive(receiver, manager, 2).sender, "the worker is gone")
    assert manager.allocate("a", TEXT) == 2 * SIZE
    [stored] = connector.tiers.saved
    assert stored.key == key_of(TEXT[: 2 * SIZE]) and len(stored.blocks) == 2, "the blocks hold the tokens of the key"


@pytest.mark.parametrize("ends", ["request_finished", "shutdown"])
def test_both_are_told_of_an_end_though_one_of_them_fails(ends, monkeypatch):
    _, connector = either(0, 0)
    told, what = [], ["a"] if ends == "request_finished" else []
    monkeypatch.setattr(connector.tiers, ends, lambda *_: 1 / 0)
    monkeypatch.setattr(connector.workers, ends, lambda *_: told.append(True))
    with pytest.raises(ZeroDivisionError):
        getattr(connector, ends)(*what)
    assert told == [True]


def test_what_a_worker_brought_is_forgotten_with_its_request():
    _, connector = either(0, 0)
    connector.brought["a"] = connector.brought["b"] = Stored(b"", None, (), 0)
    connector.request_finished("a")
    assert list(connector.brought) == ["b"]
