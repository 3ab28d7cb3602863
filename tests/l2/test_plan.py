"""Lesson 2. Reservation and plans: the slots a request owns, where it writes, what it reads, how `cur_len` grows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.base.errors import OutOfBlocks
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.token_flat import FlatMeta, FlatRequest, PagedSequence, plan_decode, plan_prefill, reserve
from tests.support import must_raise

CPU = torch.device("cpu")

each_plan = pytest.mark.parametrize(
    "plan, cur_len",
    [
        pytest.param(plan_prefill, 0, id="prefill", marks=pytest.mark.task(5)),
        pytest.param(plan_decode, 5, id="decode", marks=pytest.mark.task(6)),
    ],
)


class FixedBlocks(BlockAllocator):
    """An allocator that hands out the given blocks in the given order, and that needs no task of this lesson."""

    def __init__(self, blocks, block_size=4):
        super().__init__(max(blocks) + 1, block_size, reserved=0)
        self.free_blocks = list(blocks)[::-1]

    def alloc_blocks(self, n):
        if n < 0:
            raise ValueError(f"alloc_blocks({n})")
        if n > self.num_free:
            raise OutOfBlocks(f"need {n} blocks, {self.num_free} free")
        return [self.free_blocks.pop() for _ in range(n)]


def holding(prompt_len, blocks, cur_len=0, block_size=4):
    """Return a request with `blocks` reserved, built by hand."""
    slots = [b * block_size + offset for b in blocks for offset in range(block_size)]
    return FlatRequest([1] * prompt_len, blocks=list(blocks), slot_indices=slots, cur_len=cur_len)


def holds(request, *, blocks, slots, why):
    assert request.blocks == blocks, f"blocks: {why}"
    assert request.slot_indices == slots, (
        f"slot_indices: {why}; every slot of its blocks, in order: slot = block_id * block_size + offset"
    )


@pytest.mark.task(4)
def test_reserve_takes_whole_blocks_and_lists_all_their_slots_in_order():
    request = FlatRequest([1] * 6)
    reserve(request, FixedBlocks([5, 2, 9]), 6)
    why = "six tokens need two blocks of four, here blocks 5 and 2"
    holds(request, blocks=[5, 2], slots=[20, 21, 22, 23, 8, 9, 10, 11], why=why)


@pytest.mark.task(4)
def test_reserve_asks_only_for_what_is_missing():
    request, allocator = FlatRequest([1] * 6), FixedBlocks([5, 2, 9])
    for target in (3, 4):
        reserve(request, allocator, target)
        why = f"{target} tokens fit in one block of four"
        holds(request, blocks=[5], slots=[20, 21, 22, 23], why=why)
    reserve(request, allocator, 5)
    why = "five tokens need two blocks of four, and one was held"
    holds(request, blocks=[5, 2], slots=[20, 21, 22, 23, 8, 9, 10, 11], why=why)


@pytest.mark.task(4)
def test_reserve_of_less_than_is_held_changes_nothing():
    request, allocator = holding(6, [5, 2]), FixedBlocks([9, 7])
    try:
        reserve(request, allocator, 3)
    except ValueError as error:
        error.add_note("two blocks are held and one is needed: ask the allocator for no block, not for -1")
        raise
    holds(request, blocks=[5, 2], slots=[20, 21, 22, 23, 8, 9, 10, 11], why="two blocks are held, enough for 3 tokens")
    assert allocator.num_free == 2, "two blocks are held, enough for 3 tokens: no block must be taken"


@pytest.mark.task(4)
def test_reserve_changes_nothing_when_the_pool_is_exhausted():
    request, allocator = FlatRequest([1] * 9), FixedBlocks([5, 2])
    reserve(request, allocator, 4)
    with must_raise(OutOfBlocks, "13 tokens need three more blocks of four, and one is free"):
        reserve(request, allocator, 13)
    free = allocator.free_blocks
    assert free == [2], "a reservation that fails must take nothing"
    holds(request, blocks=[5], slots=[20, 21, 22, 23], why="a reservation that fails must take nothing")


@pytest.mark.task(4)
@given(size=st.integers(1, 9), lengths=st.lists(st.integers(0, 60), max_size=8))
def test_slots_follow_from_blocks_whatever_the_block_size(size, lengths):
    request, allocator = FlatRequest([1]), FixedBlocks(range(100, 0, -1), size)
    for length in lengths:
        reserve(request, allocator, length)
    longest = max(lengths, default=0)
    blocks = list(range(100, 100 - -(-longest // size), -1))
    slots = [block * size + offset for block in blocks for offset in range(size)]
    calls = "".join(f", reserve {length}" for length in lengths)
    holds(request, blocks=blocks, slots=slots, why=f"block_size {size}{calls}: tokens / block_size blocks, rounded up")


def planned(meta, *, positions, slots, history, is_prefill, why):
    for name, got, want in (
        ("positions", meta.positions, positions),
        ("slot_mapping", meta.slot_mapping, slots),
        ("kv_indices", meta.kv_indices, history),
    ):
        assert got.tolist() == want, f"{name}: {why}"
    assert meta.is_prefill == is_prefill, f"is_prefill: {why}"


@pytest.mark.task(5)
def test_a_prefill_writes_and_reads_the_same_slots():
    meta = plan_prefill(holding(6, [5, 2]), CPU)
    slots = [20, 21, 22, 23, 8, 9]
    why = "six tokens in slots 20-23 and 8-11, nothing written yet: they go to the first six slots and are read there"
    planned(meta, positions=[0, 1, 2, 3, 4, 5], slots=slots, history=slots, is_prefill=True, why=why)


@pytest.mark.task(5)
def test_a_prefill_behind_tokens_already_written_reads_them_too():
    meta = plan_prefill(holding(6, [5, 2], cur_len=4), CPU)
    why = "four of six tokens are in the pool already: feed two, which also see the four"
    planned(meta, positions=[4, 5], slots=[8, 9], history=[20, 21, 22, 23, 8, 9], is_prefill=True, why=why)


@pytest.mark.task(6)
def test_a_decode_writes_one_slot_and_reads_all_up_to_it():
    meta = plan_decode(holding(5, [5, 2], cur_len=5), CPU)
    why = "five tokens are written, in slots 20-23 and 8: the next one is at position 5, in slot 9, and sees itself too"
    planned(meta, positions=[5], slots=[9], history=[20, 21, 22, 23, 8, 9], is_prefill=False, why=why)


@pytest.mark.task(6)
def test_a_decode_that_enters_a_new_block_writes_its_first_slot():
    meta = plan_decode(holding(4, [5, 2], cur_len=4), CPU)
    why = "four tokens fill block 5: the next one goes to the first slot of block 2"
    planned(meta, positions=[4], slots=[8], history=[20, 21, 22, 23, 8], is_prefill=False, why=why)


@pytest.mark.task(6)
def test_a_decode_far_behind_the_prompt_follows_cur_len():
    meta = plan_decode(holding(2, [5, 2], cur_len=6), CPU)
    why = "a prompt of two, four tokens chosen since and written: the next one is at position 6"
    planned(meta, positions=[6], slots=[10], history=[20, 21, 22, 23, 8, 9, 10], is_prefill=False, why=why)


@each_plan
def test_indices_are_one_dimensional_int64(plan, cur_len):
    meta = plan(holding(5, [5, 2], cur_len=cur_len), CPU)
    for name in ("positions", "slot_mapping", "kv_indices"):
        tensor = getattr(meta, name)
        assert tensor.dim() == 1, f"{name} must be one-dimensional, a plain list of indices"
        assert tensor.dtype == torch.int64, f"{name}: torch indexes with int64"


@each_plan
def test_a_plan_is_on_the_device_it_is_given(plan, cur_len):
    meta = plan(holding(5, [5, 2], cur_len=cur_len), torch.device("meta"))
    for name in ("positions", "slot_mapping", "kv_indices"):
        got = getattr(meta, name).device.type
        assert got == "meta", f"{name} is used on the pool's device: pass `device` to torch"


@each_plan
def test_a_plan_does_not_modify_the_request(plan, cur_len):
    request = holding(5, [5, 2], cur_len=cur_len)
    plan(request, CPU)
    assert request == holding(5, [5, 2], cur_len=cur_len), (
        "a plan only reads the request: cur_len grows in commit, after the step has run"
    )


@pytest.mark.task(8)
@pytest.mark.parametrize("cur_len, fed", [(0, 6), (5, 1), (4, 2)])
def test_commit_adds_the_tokens_that_the_step_fed(cur_len, fed):
    request = holding(6, [5, 2], cur_len=cur_len)
    slots = torch.tensor(request.slot_indices[: cur_len + fed])
    positions = torch.arange(cur_len, cur_len + fed)
    PagedSequence(request, None, None).commit(FlatMeta(positions, slots[cur_len:], slots, is_prefill=fed > 1))
    assert request.cur_len == cur_len + fed, (
        f"{cur_len} tokens were written, and the step fed {fed}; the token just chosen has no KV yet"
    )
    kind = type(request.cur_len).__name__
    assert kind == "int", "cur_len is a plain number"
