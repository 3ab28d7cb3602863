"""Lesson 12. Bringing back is chosen when it is faster, tier by tier, and never past a block that is missing."""

import math
from types import SimpleNamespace

import pytest

from mini_engine.tiers import break_even, opening
from mini_engine.tiers.break_even import BreakEven, Speed, measured_copy, measured_disk, measured_rate
from mini_engine.tiers.keys import Identity
from mini_engine.tiers.store import ALWAYS, BlockStore, MinTokens, Prefix

FAST = BreakEven(prefill_rate=400.0, bytes_per_token=1000, bandwidth=800_000.0, latency=0.1)  # 2 x the rate of prefill


@pytest.mark.task(3)
def test_the_break_even_is_where_both_take_the_same_time():
    n = FAST.num_tokens
    assert n == pytest.approx(80.0), "n / rate = latency + n * bytes / bandwidth, solved for n"
    assert n / FAST.prefill_rate == pytest.approx(FAST.latency + n * FAST.bytes_per_token / FAST.bandwidth)


@pytest.mark.task(3)
@pytest.mark.parametrize("bandwidth", [400_000.0, 399_999.0, 1.0])
def test_a_tier_that_is_no_faster_than_prefill_never_wins(bandwidth):
    slow = BreakEven(400.0, 1000, bandwidth, latency=0.1)
    assert slow.num_tokens == math.inf, "a negative number of tokens is not an early win"


@pytest.mark.task(3)
def test_without_latency_a_faster_tier_wins_from_the_first_token():
    instant = BreakEven(400.0, 1000, 800_000.0)
    assert instant.num_tokens == 0


SIZE = 16
NEVER = math.inf
FROM_3_BLOCKS = 2.5 * SIZE  # between two and three blocks


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


def test_a_part_of_a_prefix_is_a_block_with_its_key_and_the_key_before():
    prefix = Text()
    prefix.tokens = b"".join(bytes([65 + number]) * 6 for number in range(10))
    assert prefix.part(0) == (prefix.keys[1], prefix.keys[0], b"AAAAAA")
    assert prefix.part(3) == (prefix.keys[4], prefix.keys[3], b"DDDDDD"), "block 3 has the tokens of its own place"


def asked(host, disk, start=0, stop=10, min_tokens=ALWAYS):
    """Return the numbers of the blocks that are asked for."""
    store = BlockStore(Held(host, disk), NoBlocks(), Identity("w", "c", "f", SIZE), min_tokens)
    return [Text.KEYS.index(one.key) - 1 for one in store.wanted(Text(), start, stop)]


@pytest.mark.task(3)
def test_nothing_to_bring_back_does_not_pay():
    assert asked([], []) == asked([], [], min_tokens=MinTokens(0, 0)) == [], "nothing is there to be brought back"


@pytest.mark.task(3)
def test_fewer_tokens_than_the_break_even_are_computed():
    for count, pays in ((1, False), (4, False), (6, True), (9, True)):
        want = [*range(count)] if pays else []
        why = f"{count * SIZE} tokens {'pay' if pays else 'do not pay'} where the break-even is 80"
        assert asked(range(count), [], min_tokens=MinTokens(host=80)) == want, f"in host memory, {why}"
        assert asked([], range(count), min_tokens=MinTokens(disk=80)) == want, f"on the disk, {why}"


@pytest.mark.task(3)
def test_from_the_break_even_on_it_pays():
    exact = BreakEven(prefill_rate=256.0, bytes_per_token=1024, bandwidth=524_288.0, latency=0.125)  # all powers of two
    assert exact.num_tokens == 64
    for count, pays in ((3, False), (4, True), (5, True)):
        want = [*range(count)] if pays else []
        why = f"{count * SIZE} tokens {'pay' if pays else 'do not pay'} where both take the same time at 64"
        assert asked(range(count), [], min_tokens=MinTokens(host=exact.num_tokens)) == want, why
        assert asked([], range(count), min_tokens=MinTokens(disk=exact.num_tokens)) == want, why


@pytest.mark.task(3)
def test_what_is_asked_for_ends_where_the_first_block_is_missing():
    assert asked(range(4), []) == [0, 1, 2, 3], "host memory has blocks 0 … 3"
    assert asked([0, 1, 3, 4], [2]) == [0, 1, 2, 3, 4], "a block may be in either tier"
    assert asked([0, 1, 3, 4], []) == [0, 1], "K and V after a missing block are no use"
    assert asked([1, 2, 3], []) == [], "the first block is missing"
    assert asked([0, 1], [3, 4]) == [0, 1], "block 2 is missing: K and V that the disk has after it are no use"
    assert asked([], [1, 2, 3]) == [], "the first block is missing, so what the disk has after it is no use"
    assert asked([0], [1, 3]) == [0, 1], "block 2 is missing: the disk's run ends there"


@pytest.mark.task(3)
def test_only_the_part_that_the_tree_lacks_is_asked_for():
    assert asked(range(10), [], start=3, stop=7) == [3, 4, 5, 6], "of blocks start … stop - 1"
    assert asked(range(10), range(10), start=4, stop=4) == [], "the tree has all of it"


@pytest.mark.task(3)
def test_a_disk_that_does_not_pay_leaves_what_host_memory_has():
    why = "blocks from the disk do not pay here: ask for those before them"
    assert asked([0, 1], [2, 3, 4], min_tokens=MinTokens(disk=NEVER)) == [0, 1], why
    assert asked([], [0, 1, 2], min_tokens=MinTokens(disk=NEVER)) == [], why


@pytest.mark.task(3)
def test_the_disk_is_judged_by_the_blocks_that_it_must_bring():
    min_tokens = MinTokens(disk=FROM_3_BLOCKS)
    assert asked([0, 1], [2, 3, 4], min_tokens=min_tokens) == [0, 1, 2, 3, 4], "three blocks from the disk pay"
    assert asked([0, 1, 3, 4], [2], min_tokens=min_tokens) == [0, 1, 2, 3, 4], (
        "one block from the disk gives two more that host memory has: it brings three"
    )
    assert asked([0, 1, 2], [3, 4], min_tokens=min_tokens) == [0, 1, 2], "two do not, however many lie in host memory"


@pytest.mark.task(3)
def test_host_memory_is_judged_too():
    assert asked(range(3), [], min_tokens=MinTokens(host=NEVER)) == [], "not even host memory pays here"
    min_tokens = MinTokens(host=FROM_3_BLOCKS)
    assert asked(range(2), [], min_tokens=min_tokens) == [], "two blocks do not pay"
    assert asked(range(4), [], min_tokens=min_tokens) == [0, 1, 2, 3], "four blocks pay; min_tokens counts tokens"
    assert asked([0], [1, 2, 3], min_tokens=min_tokens) == [0, 1, 2, 3], "min_tokens.host is for all of it"


@pytest.mark.task(3)
def test_host_memory_is_judged_without_what_the_disk_was_left_out_for():
    min_tokens = MinTokens(host=FROM_3_BLOCKS, disk=NEVER)
    assert asked([0, 1], [2, 3], min_tokens=min_tokens) == [], (
        "blocks 2 and 3 are left out, and the two that are left do not pay: min_tokens.disk first, then min_tokens.host"
    )
    assert asked([0, 1, 2], [3], min_tokens=min_tokens) == [0, 1, 2], "block 3 is left out, and three pay"


@pytest.mark.task(3)
def test_a_disk_that_pays_is_not_read_if_all_of_it_does_not():
    min_tokens = MinTokens(host=NEVER)
    assert asked([0], [1, 2, 3], min_tokens=min_tokens) == [], "all of it does not pay, the disk's blocks included"


@pytest.mark.task(3)
def test_what_the_tree_has_is_not_judged():
    for min_tokens in (MinTokens(host=FROM_3_BLOCKS), MinTokens(disk=FROM_3_BLOCKS)):
        host, disk = (range(10), []) if min_tokens.host == FROM_3_BLOCKS else ([], range(10))
        assert asked(host, disk, start=5, stop=7, min_tokens=min_tokens) == [], "two blocks, not seven: 5 and 6"
        assert asked(host, disk, start=5, stop=8, min_tokens=min_tokens) == [5, 6, 7], "three blocks pay: 5, 6 and 7"


@pytest.mark.task(3)
def test_only_the_part_that_the_tree_lacks_is_asked_of_the_disk():
    assert asked([], range(10), start=3, stop=7) == [3, 4, 5, 6], "of blocks start … stop - 1, on the disk too"
    assert asked([3], range(4, 10), start=3, stop=7) == [3, 4, 5, 6], "of blocks start … stop - 1, in either tier"


def test_what_is_measured_is_positive_and_leaves_no_file(tmp_path):
    disk = measured_disk(tmp_path, 4096)
    assert disk.bandwidth > 0 and disk.latency >= 0 and not list(tmp_path.iterdir())


class Clock:
    """A clock that stands still until something takes time."""

    now = 0.0

    def __call__(self):
        return self.now

    def take(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(break_even.time, "perf_counter", clock)
    return clock


def test_the_rate_of_prefill_is_tokens_a_second_without_the_first_call(clock):
    taken = iter([9.0, *[0.25] * 100])  # a first call compiles and warms up
    assert measured_rate(lambda num_tokens: clock.take(next(taken)), 64) == 256.0


def test_a_copy_has_a_bandwidth_and_no_latency(clock):
    class Cells:
        payload_bytes = 4096

        def write(self, blocks, payloads):
            assert (list(blocks), len(payloads[0])) == ([0], 4096), "only the null block may be overwritten"
            clock.take(0.5)

    assert measured_copy(Cells()) == Speed(8192.0, 0.0)


def test_a_disk_has_the_latency_of_one_byte_and_the_bandwidth_of_the_rest(clock, monkeypatch, tmp_path):
    sizes = []

    def read(path, num_bytes):
        sizes.append(num_bytes)
        clock.take(0.25 + (num_bytes - 1) / 2**20)
        return path.read_bytes()[:num_bytes]

    monkeypatch.setattr(break_even, "read_cold", read)
    for num_bytes, probe in ((2**10, 2**20), (2**21, 2**21)):
        speed = measured_disk(tmp_path, num_bytes)
        assert max(sizes) == probe, "a few bytes say nothing about a disk: the probe has at least 1 MiB"
        assert speed.latency == 0.25, "what one byte takes is waiting"
        assert speed.bandwidth == pytest.approx(2**20, rel=1e-3), "bytes a second, without the waiting"


def test_what_comes_back_with_any_number_of_blocks_is_part_of_the_latency(monkeypatch, tmp_path):
    """A state of 600 bytes, at 1,000 and 100 bytes a second; blocks of 8 tokens and 80 bytes."""
    monkeypatch.setattr(opening, "measured_copy", lambda blocks: Speed(1000.0, 0.0))
    monkeypatch.setattr(opening, "measured_disk", lambda directory, num_bytes: Speed(100.0, 0.25))
    found = opening.break_evens(5.0, tmp_path, SimpleNamespace(payload_bytes=80), 8, 600)
    assert found == {"host": BreakEven(5.0, 10, 1000.0, 0.6), "disk": BreakEven(5.0, 10, 100.0, 6.25)}


@pytest.mark.parametrize("directory", [None, "refuses"])
def test_a_disk_that_is_not_there_or_cannot_be_written_is_not_measured(monkeypatch, directory):
    def refuse(directory, num_bytes):
        raise PermissionError

    monkeypatch.setattr(opening, "measured_copy", lambda blocks: Speed(1000.0, 0.0))
    monkeypatch.setattr(opening, "measured_disk", refuse)
    assert list(opening.break_evens(5.0, directory, SimpleNamespace(payload_bytes=80), 8, 0)) == ["host"]
