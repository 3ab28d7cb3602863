"""Lesson 18. Collectives in shared memory: every rank has the same sum, whoever comes first, and nobody waits in vain.

The ranks are threads here. C++ waits without Python's lock, so they meet as processes do.
"""

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.base.errors import UserError
from mini_engine.distributed.tensor_parallel.shared_block import SharedBlock
from mini_engine.distributed.tensor_parallel.shared_memory import LIBRARY, SharedMemoryCollectives, meeting_bytes

try:
    LIBRARY.load()
except UserError as why:
    pytest.skip(str(why), allow_module_level=True)

PLACE = 64  # bytes: a sum of 40 numbers goes in pieces
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


class Together:
    """All ranks of a model, in threads."""

    def __init__(self, num_ranks, patience=60.0):
        self.block = block = SharedBlock(meeting_bytes(num_ranks, PLACE))
        self.lost = ctypes.c_int32.from_address(block.address)
        self.ranks = [SharedMemoryCollectives(rank, num_ranks, block, patience, PLACE) for rank in range(num_ranks)]
        self.threads = ThreadPoolExecutor(num_ranks)

    def each(self, work):
        """Call work(collectives) in every rank at once; return the results in the order of the ranks."""
        return [done.result() for done in [self.threads.submit(work, rank) for rank in self.ranks]]


def part_of(rank, shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


def added(parts):
    """The sum in the order of the ranks, in float32, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@settings(max_examples=40, deadline=None)
@given(num_ranks=st.integers(1, 4), rows=st.integers(1, 5), width=st.integers(1, 40), dtype=DTYPES)
def test_all_ranks_have_the_same_sum_bit_for_bit(num_ranks, rows, width, dtype):
    together = Together(num_ranks)
    for seed in range(3):  # a later sum must not find parts of an earlier one
        parts = [part_of(rank, (rows, width), dtype, seed) for rank in range(num_ranks)]
        found = together.each(lambda one, parts=parts: one.all_reduce(parts[one.rank].clone()))
        for rank, sums in enumerate(found):
            assert torch.equal(sums, added(parts)), f"rank {rank} of {num_ranks} has another sum of {rows} × {width}"


@pytest.mark.parametrize(("dtype", "large"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)], ids=str)
def test_half_precision_is_widened_for_sums_and_rounded_once(dtype, large):
    """In its own dtype, the large number and 1 are the large number."""
    parts = [torch.tensor([[number, 1.5]], dtype=dtype) for number in (large, 1.0, 1.0)]
    for sums in Together(3).each(lambda one: one.all_reduce(parts[one.rank])):
        assert sums.dtype == dtype and sums.tolist() == [[large + 2, 4.5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_rank_0_adds_what_all_ranks_have(dtype):
    """A residual must go into a sum once."""
    assert [one.native(dtype).is_first for one in Together(3).ranks] == [True, False, False]


def test_a_sum_replaces_the_part_where_it_is():
    together = Together(2)
    parts = [torch.arange(12.0).view(3, 4).t().clone().t(), torch.ones(3, 4).t().contiguous().t()]  # by columns, too
    found = together.each(lambda one: one.all_reduce(parts[one.rank]))
    for part, sums in zip(parts, found, strict=True):
        assert part is sums and torch.equal(part, torch.arange(12.0).view(3, 4) + 1), "in place, whatever its strides"


@pytest.mark.parametrize("late", [0, 1])
def test_a_fast_rank_does_not_overwrite_what_a_slow_one_still_reads(late):
    """One rank dawdles before every meeting; two places in turn are enough for the other to run ahead safely."""
    together, rounds = Together(2), 60

    def sums(one):
        found = []
        for turn in range(rounds):
            if one.rank == late and turn % 7 == 0:
                time.sleep(0.002)
            found.append(one.all_reduce(torch.full((33,), float(10 * turn + one.rank)))[[0, 32]].tolist())
        return found

    for rank, found in enumerate(together.each(sums)):
        expected = [[20.0 * turn + 1] * 2 for turn in range(rounds)]
        assert found == expected, f"rank {rank} added a part of another meeting"


@settings(max_examples=25, deadline=None)
@given(num_ranks=st.integers(1, 4), rows=st.integers(1, 4), width=st.integers(1, 30), dtype=DTYPES)
def test_rank_0_gathers_side_by_side(num_ranks, rows, width, dtype):
    parts = [part_of(rank, (rows, width), dtype) for rank in range(num_ranks)]
    first, *others = Together(num_ranks).each(lambda one: one.gather(parts[one.rank]))
    assert torch.equal(first, torch.cat(parts, dim=1)), "rank 0 has the columns of all ranks in their order"
    assert all(torch.equal(mine, part) for mine, part in zip(others, parts[1:], strict=True))


def test_what_is_brought_is_counted():
    together = Together(2)
    together.each(lambda one: one.all_reduce(torch.zeros(50)))
    together.each(lambda one: one.gather(torch.zeros(2, 3, dtype=torch.bfloat16)))
    for one in together.ranks:
        assert (one.traffic.calls, one.traffic.bytes) == (2, 200 + 12), "a call counts once, however many its pieces"


def test_whoever_waits_for_a_rank_that_is_lost_is_told():
    together = Together(2)
    waiting = together.threads.submit(together.ranks[0].all_reduce, torch.zeros(3))
    while not any(together.block.buffer):  # until rank 0 has arrived
        time.sleep(0.002)
    assert not waiting.done(), "rank 0 waits for rank 1"
    together.lost.value = 1
    with pytest.raises(RuntimeError, match="ended"):
        waiting.result(timeout=60)
    with pytest.raises(RuntimeError, match="ended"):
        together.ranks[1].all_reduce(torch.zeros(3))


def test_nobody_waits_longer_than_patience_allows():
    with pytest.raises(RuntimeError, match="in time"):
        Together(2, patience=0.05).ranks[0].gather(torch.zeros(2, 2))
