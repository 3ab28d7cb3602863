"""Lesson 12. Bringing back is chosen when it is faster, tier by tier, and never past a block that is missing."""

import math

import pytest

from mini_engine.tiers.break_even import BreakEven, measured_copy, measured_disk, measured_rate
from mini_engine.tiers.keys import Identity
from mini_engine.tiers.store import Always, BlockStore, Judges, Prefix

FAST = BreakEven(prefill_rate=400.0, bytes_per_token=1000, bandwidth=800_000.0, latency=0.1)  # 2 x the rate of prefill


def test_the_break_even_is_where_both_take_the_same_time():
    n = FAST.num_tokens
    assert n == pytest.approx(80.0), "n / rate = latency + n * bytes / bandwidth, solved for n"
    assert n / FAST.prefill_rate == pytest.approx(FAST.latency + n * FAST.bytes_per_token / FAST.bandwidth)


@pytest.mark.parametrize("bandwidth", [400_000.0, 399_999.0, 1.0])
def test_a_tier_that_is_no_faster_than_prefill_never_wins(bandwidth):
    slow = BreakEven(400.0, 1000, bandwidth, latency=0.1)
    assert slow.num_tokens == math.inf and not slow.pays(10**9), "a negative number of tokens is not an early win"


def test_without_latency_a_faster_tier_wins_from_the_first_token():
    instant = BreakEven(400.0, 1000, 800_000.0)
    assert instant.pays(1) and instant.num_tokens == 0


def test_nothing_to_bring_back_does_not_pay():
    assert FAST.pays(0) is False, "no tokens: there is nothing to bring back"
    assert BreakEven(400.0, 1000, 800_000.0).pays(0) is False, "no tokens do not pay, even where the latency is 0"
    assert not Always().pays(0)


def test_fewer_tokens_than_the_break_even_are_computed():
    for num_tokens, pays in ((1, False), (79, False), (81, True), (5000, True)):
        assert bool(FAST.pays(num_tokens)) is pays, f"{num_tokens} tokens, where the break-even is 80"


SIZE = 16
NEVER = BreakEven(400.0, 1000, 1.0)
FROM_3_BLOCKS = BreakEven(400.0, 1000, 800_000.0, latency=2.5 * SIZE / 800)  # between two and three blocks


class Text(Prefix):
    """Ten blocks whose keys are their numbers; key 0 is the root."""

    KEYS = tuple(bytes([number]) for number in range(11))

    def __init__(self):
        """Ask `chain` for no keys: task 2 need not be written."""
        self.tokens, self.width, self.keys = b"tokens" * 10, 6, list(self.KEYS)


class Held:
    """Tiers that hold the blocks with these numbers."""

    def __init__(self, host, disk):
        self.host, self.disk = ({Text.KEYS[number + 1] for number in numbers} for numbers in (host, disk))

    def __contains__(self, key):
        return key in self.host or key in self.disk


class NoBlocks:
    payload_bytes = 8


def asked(host, disk, start=0, stop=10, judges=None):
    """Return the numbers of the blocks that are asked for."""
    store = BlockStore(Held(host, disk), NoBlocks(), Identity("w", "c", "f", SIZE), judges)
    return [Text.KEYS.index(one.key) - 1 for one in store.wanted(Text(), start, stop)]


def test_what_is_asked_for_ends_where_the_first_block_is_missing():
    assert asked(range(4), []) == [0, 1, 2, 3], "host memory has blocks 0 … 3"
    assert asked([0, 1, 3, 4], [2]) == [0, 1, 2, 3, 4], "a block may be in either tier"
    assert asked([0, 1, 3, 4], []) == [0, 1], "K and V behind a missing block are no use"
    assert asked([1, 2, 3], []) == [], "the first block is missing"


def test_only_the_part_that_the_tree_lacks_is_asked_for():
    assert asked(range(10), [], start=3, stop=7) == [3, 4, 5, 6], "of blocks start … stop - 1"


def test_a_disk_that_does_not_pay_leaves_what_host_memory_has():
    why = "blocks from the disk do not pay here: ask for those before them"
    assert asked([0, 1], [2, 3, 4], judges=Judges(disk=NEVER)) == [0, 1], why
    assert asked([], [0, 1, 2], judges=Judges(disk=NEVER)) == [], why


def test_the_disk_is_judged_by_the_blocks_that_it_must_bring():
    judges = Judges(disk=FROM_3_BLOCKS)
    assert asked([0, 1], [2, 3, 4], judges=judges) == [0, 1, 2, 3, 4], "three blocks from the disk pay"
    assert asked([0, 1, 3, 4], [2], judges=judges) == [0, 1, 2, 3, 4], (
        "one block from the disk gives two more that host memory has: what it brings is three"
    )
    assert asked([0, 1, 2], [3, 4], judges=judges) == [0, 1, 2], "two do not, however many lie in host memory"


def test_host_memory_is_judged_too():
    assert asked(range(3), [], judges=Judges(host=NEVER)) == [], "not even host memory pays here"
    judges = Judges(host=FROM_3_BLOCKS)
    assert asked(range(2), [], judges=judges) == [], "two blocks do not pay"
    assert asked(range(4), [], judges=judges) == [0, 1, 2, 3], "four blocks pay; pays() is asked about tokens"
    assert asked([0], [1, 2, 3], judges=judges) == [0, 1, 2, 3], "judges.host is asked about all of it"


def test_what_is_measured_is_positive_and_leaves_no_file(tmp_path):
    class Cells:
        payload_bytes = 4096

        def write(self, blocks, payloads):
            assert len(blocks) == len(payloads) == 1 and len(payloads[0]) == 4096

    disk, copy = measured_disk(tmp_path, 4096), measured_copy(Cells())
    assert disk.bandwidth > 0 and disk.latency >= 0 and copy.bandwidth > 0 and not list(tmp_path.iterdir())
    assert measured_rate(lambda num_tokens: sum(range(1000 * num_tokens))) > 0
