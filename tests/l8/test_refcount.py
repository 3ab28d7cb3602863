"""Lesson 8. Reference-counted blocks: free exactly when they have no holders."""

import contextlib
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mini_engine.kv.refcount import RefCountedAllocator
from tests.shared.trees import Contended, refused


def holding(counts, num_blocks=8):
    """Return an allocator whose blocks have the reference counts of `counts`, built by hand."""
    allocator = RefCountedAllocator(num_blocks, 4)
    for block, count in counts.items():
        allocator.counts[block] = count
        allocator.held.add(block)
        allocator.free_blocks.remove(block)
    return allocator


def books(allocator):
    return list(allocator.counts), set(allocator.held), list(allocator.free_blocks)


def test_a_block_that_is_handed_out_has_one_holder():
    allocator = RefCountedAllocator(8, 4)
    blocks = allocator.alloc_blocks(3)
    assert [allocator.counts[block] for block in blocks] == [1, 1, 1]


@pytest.mark.task(1)
def test_a_shared_block_is_free_only_when_its_last_holder_frees_it():
    allocator = holding({3: 2})
    allocator.free([3])
    assert 3 in allocator.held and 3 not in allocator.free_blocks, "block 3 still has a holder: it is not free yet"
    allocator.free([3])
    assert 3 in allocator.free_blocks and allocator.counts[3] == 0, "block 3 has no holders left: it must be free"


@pytest.mark.task(1)
def test_freeing_several_blocks_frees_those_without_other_holders():
    allocator = holding({3: 2, 4: 1, 5: 3})
    allocator.free([3, 4, 5])
    assert allocator.counts[3:6] == [1, 0, 2], "free must take one holder from each of the blocks 3, 4 and 5"
    assert allocator.held == {3, 5}, "blocks 3 and 5 still have holders, block 4 has none left"
    assert sorted(allocator.free_blocks) == [1, 2, 4, 6, 7], "a block without holders is free, and is so exactly once"


@pytest.mark.task(1)
@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param([3, 3], id="a block is named twice"),
        pytest.param([3, 6], id="a block is not held"),
        pytest.param([0], id="the null block"),
        pytest.param([-1], id="a negative id"),
    ],
)
def test_what_cannot_be_freed_is_refused_and_changes_no_count(blocks):
    allocator = holding({3: 2})
    before = books(allocator)
    with refused(f"free({blocks}) must raise ValueError: only block 3 is held, and a holder frees a block once"):
        allocator.free(blocks)
    assert books(allocator) == before, "a refused call must change no count: check all blocks before changing any"


@pytest.mark.task(1)
def test_freeing_no_blocks_changes_nothing():
    allocator = holding({3: 2})
    before = books(allocator)
    allocator.free([])
    assert books(allocator) == before, "no block was named, so none may change"


@pytest.mark.parametrize("blocks", [[3, 6], [0], [99]])
def test_a_block_without_holders_cannot_be_shared(blocks):
    allocator = holding({3: 1})
    before = books(allocator)
    with pytest.raises(ValueError):
        allocator.share(blocks)
    assert books(allocator) == before


class Guarded(list):
    """A list that may change only while `mutex` is held."""

    def __init__(self, items, mutex):
        super().__init__(items)
        self.mutex = mutex

    def __setitem__(self, index, value):
        assert self.mutex.is_held, "a count was changed outside `with self.mutex`: another thread may change it as well"
        super().__setitem__(index, value)

    def extend(self, blocks):
        assert self.mutex.is_held, "the free list was changed outside `with self.mutex`: another thread may change it"
        super().extend(blocks)


@pytest.mark.task(1)
def test_counts_and_free_list_change_only_under_the_mutex():
    allocator = holding({3: 2, 4: 1})
    allocator.mutex = Contended()
    allocator.counts = Guarded(allocator.counts, allocator.mutex)
    allocator.free_blocks = Guarded(allocator.free_blocks, allocator.mutex)
    allocator.free([3, 4])
    assert not allocator.mutex.is_held, "free must release self.mutex, or the next call waits for ever"


@pytest.mark.task(1)
def test_what_another_thread_freed_meanwhile_is_refused():
    allocator = holding({3: 1})

    def other_thread():
        allocator.counts[3] = 0
        allocator.held.remove(3)
        allocator.free_blocks.append(3)

    allocator.mutex = Contended(other_thread)
    with contextlib.suppress(ValueError):
        allocator.free([3])
    assert (allocator.counts[3], allocator.free_blocks.count(3)) == (0, 1), (
        "another thread freed block 3 while this call waited for self.mutex: check under the mutex, not before it"
    )


class Dawdling(list):
    """A list that lets other threads run between a read and the write that depends on it; without a lock they clash."""

    def __getitem__(self, index):
        found = super().__getitem__(index)
        time.sleep(0)
        return found


@pytest.mark.task(1)
@pytest.mark.skipif(sys.platform == "emscripten", reason="a page has no threads; check it in a terminal")
def test_threads_that_share_and_free_leave_every_count_right():
    allocator = RefCountedAllocator(64, 4)
    common = allocator.alloc_blocks(8)
    allocator.counts, allocator.free_blocks = Dawdling(allocator.counts), Dawdling(allocator.free_blocks)

    def work(seed):
        chance = random.Random(seed)
        for _ in range(30):
            mine = allocator.alloc_blocks(chance.randrange(4))
            allocator.share(common)
            allocator.free(common)
            allocator.free(mine)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert [allocator.counts[block] for block in common] == [1] * 8, "threads lost counts: each call must be atomic"
    assert allocator.held == set(common) and len(allocator.free_blocks) == 55
