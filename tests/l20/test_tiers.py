"""Lesson 20. Host memory, too, drops a crowd's records before those of sessions, up to three quarters of it.

Protects sessions whose blocks the pool has lost, the others from sessions, and the order without sessions.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.kv.prefixes import Stored
from mini_engine.kv.radix_node import key_of
from mini_engine.tiers.connector import TierConnector
from mini_engine.tiers.host import PREFERRED, HostTier
from mini_engine.tiers.keys import Identity
from mini_engine.tiers.records import Record
from mini_engine.tiers.store import BlockStore
from mini_engine.tiers.tiers import NoDisk, Tiers
from tests.shared.tier_items import SIZE, record

BLOCK = 4


def tier_of(count, preferred=()):
    """Return a tier full of so many records, some of which are preferred."""
    tier = HostTier(count * SIZE)
    for number in range(count):
        tier.put(record(number))
    tier.prefer([record(number).key for number in preferred])
    return tier


def kept_in(tier, most=40):
    return [number for number in range(most) if record(number).key in tier]


def test_preferred_records_go_after_the_others():
    tier = tier_of(8, preferred=(0, 1))
    for number in range(8, 20):
        tier.put(record(number))
    assert kept_in(tier) == [0, 1, *range(14, 20)], "records of no session go first, the oldest of them first"
    assert tier.num_evicted == 12 and tier.num_bytes == 8 * SIZE


def test_of_a_preferred_text_that_is_too_long_the_end_is_nobody_s():
    tier = tier_of(8, preferred=range(8))
    assert tier.preferred_bytes <= PREFERRED * tier.max_bytes
    for number in range(8, 20):
        tier.put(record(number))
    assert kept_in(tier) == [*range(6), 18, 19], (
        "three quarters at most are preferred: a text is useful from its beginning, so its end goes"
    )


def test_the_text_preferred_last_is_kept():
    tier = tier_of(8, preferred=range(4))
    tier.prefer([record(number).key for number in range(4, 8)])
    for number in range(8, 20):
        tier.put(record(number))
    assert kept_in(tier) == [0, 1, 4, 5, 6, 7, 18, 19]


def test_a_record_as_large_as_the_tier_takes_even_what_is_preferred():
    tier = HostTier(record(0).num_bytes)
    tier.put(record(0))
    tier.preferred[record(0).key] = tier.preferred_bytes = SIZE
    tier.put(record(1))
    assert kept_in(tier) == [1] and tier.preferred_bytes == 0 and not tier.preferred


@given(st.lists(st.tuples(st.sampled_from("pgf"), st.lists(st.integers(0, 9), min_size=1, max_size=4)), max_size=60))
def test_the_books_are_right_whatever_is_preferred(calls):
    tier, last = HostTier(5 * SIZE + SIZE // 2), None
    for call, numbers in calls:
        if call == "p":
            tier.put(record(numbers[0]))
            last = numbers[0]
        elif call == "g":
            tier.get(record(numbers[0]).key)
        else:
            tier.prefer([record(number).key for number in numbers])
        assert tier.preferred.keys() <= tier.records.keys(), "what is gone is not preferred"
        assert tier.preferred_bytes == SIZE * len(tier.preferred) <= PREFERRED * tier.max_bytes
        assert tier.num_bytes == SIZE * len(tier.records) <= tier.max_bytes
        assert last is None or call != "p" or record(last).key in tier, "the newest record is kept"
    tier.clear()
    assert not tier.preferred and tier.preferred_bytes == 0


class Letters:
    """A pool whose blocks are their own numbers as bytes."""

    payload_bytes = 8

    def read(self, blocks):
        return [block.to_bytes(8, "little") for block in blocks]

    def write(self, blocks, payloads):
        raise AssertionError("nothing is loaded here")


class Asked:
    """A request, as a connector knows it: the text with this number."""

    def __init__(self, number, session):
        self.id, self.session = f"request {number}", session
        self.key = key_of(range(100 * number, 100 * number + 4 * BLOCK))


def kept_of(session, prefers_sessions):
    """Save a text of four blocks, then a crowd's; return how many blocks of the first one host memory still has."""
    host = HostTier(8 * Record(bytes(32), bytes(32), bytes(4 * BLOCK), bytes(Letters.payload_bytes)).num_bytes)
    store = BlockStore(Tiers(host, NoDisk()), Letters(), Identity("weights", "config", "letters", BLOCK))
    connector = TierConnector(store, prefers_sessions=prefers_sessions)
    asked = [Asked(0, session), *(Asked(number, None) for number in range(1, 9))]
    for one in asked:
        connector.request_added(one)
        connector.save_kv(one.id, Stored(one.key, None, [1, 2, 3, 4], 0), False)
    connector.shutdown()
    return sum(key in host for key in store.prefix(asked[0].key, None, 4 * BLOCK).keys[1:])


@pytest.mark.parametrize(("session", "prefers", "kept"), [("agent", True, 4), (None, True, 0), ("agent", False, 0)])
def test_a_session_s_text_outlives_a_crowd_s(session, prefers, kept):
    assert kept_of(session, prefers) == kept
