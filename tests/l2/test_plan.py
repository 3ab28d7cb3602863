"""Lesson 2. Reservation and plans: the slots a request owns, where it writes, what it reads, how `cur_len` grows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.errors import OutOfBlocks
from mini_engine.kv.token_flat import ForwardMeta, PagedSequence, Request, plan_decode, plan_prefill, reserve

CPU = torch.device("cpu")


class FixedBlocks:
    """An allocator that hands out the given blocks in the given order."""

    def __init__(self, blocks, block_size=4):
        self.left, self.block_size = list(blocks), block_size

    def alloc_blocks(self, n):
        if n > len(self.left):
            raise OutOfBlocks(f"need {n} blocks, {len(self.left)} free")
        out, self.left = self.left[:n], self.left[n:]
        return out


def holding(prompt_len, blocks, cur_len=0, block_size=4):
    """Return a request with `blocks` reserved, built by hand."""
    slots = [b * block_size + offset for b in blocks for offset in range(block_size)]
    return Request([1] * prompt_len, blocks=list(blocks), slot_indices=slots, cur_len=cur_len)


def test_reserve_takes_whole_blocks_and_lists_all_their_slots_in_order():
    request = Request([1] * 6)
    reserve(request, FixedBlocks([5, 2, 9]), 6)
    assert request.blocks == [5, 2], f"{request.blocks}: six tokens need two blocks of four"
    assert request.slot_indices == [20, 21, 22, 23, 8, 9, 10, 11], (
        "every slot of both blocks, in order: slot = block_id * block_size + offset"
    )


def test_reserve_asks_only_for_what_is_missing():
    request, allocator = Request([1] * 6), FixedBlocks([5, 2, 9])
    reserve(request, allocator, 3)
    reserve(request, allocator, 4)
    assert request.blocks == [5], f"{request.blocks}: four tokens fit in the block the request already holds"
    reserve(request, allocator, 5)
    assert request.blocks == [5, 2] and len(request.slot_indices) == 8


def test_reserve_changes_nothing_when_the_pool_is_exhausted():
    request, allocator = Request([1] * 9), FixedBlocks([5, 2])
    reserve(request, allocator, 4)
    with pytest.raises(OutOfBlocks):
        reserve(request, allocator, 13)
    assert (request.blocks, allocator.left) == ([5], [2]), "a reservation that fails must take nothing"
    assert request.slot_indices == [20, 21, 22, 23]


@given(size=st.integers(1, 9), lengths=st.lists(st.integers(0, 60), max_size=8))
def test_slots_follow_from_blocks_whatever_the_block_size(size, lengths):
    request, allocator = Request([1]), FixedBlocks(range(100, 0, -1), size)
    for length in lengths:
        reserve(request, allocator, length)
    longest = max(lengths, default=0)
    assert len(request.blocks) == -(-longest // size), "blocks = tokens / block_size, rounded up"
    assert request.slot_indices == [b * size + i for b in request.blocks for i in range(size)]


def test_a_prefill_writes_and_reads_the_same_slots():
    meta = plan_prefill(holding(6, [5, 2]), CPU)
    assert meta.positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert meta.slot_mapping.tolist() == [20, 21, 22, 23, 8, 9], "the six tokens go to the first six slots"
    assert meta.kv_indices.tolist() == meta.slot_mapping.tolist(), (
        "there is no earlier history: it reads the slots it writes"
    )
    assert meta.is_prefill


def test_a_prefill_behind_tokens_already_written_reads_them_too():
    meta = plan_prefill(holding(6, [5, 2], cur_len=4), CPU)
    assert meta.positions.tolist() == [4, 5] and meta.slot_mapping.tolist() == [8, 9]
    assert meta.kv_indices.tolist() == [20, 21, 22, 23, 8, 9], (
        "it also sees the four tokens that are already in the pool"
    )


def test_a_decode_writes_one_slot_and_reads_all_up_to_it():
    meta = plan_decode(holding(5, [5, 2], cur_len=5), CPU)
    assert meta.positions.tolist() == [5], (
        f"{meta.positions.tolist()}: five tokens are written, so the next position is 5"
    )
    assert meta.slot_mapping.tolist() == [9], "the sixth slot of the request"
    assert meta.kv_indices.tolist() == [20, 21, 22, 23, 8, 9], "it reads the history and the token itself"
    assert not meta.is_prefill


def test_a_decode_that_enters_a_new_block_writes_its_first_slot():
    meta = plan_decode(holding(4, [5, 2], cur_len=4), CPU)
    assert meta.slot_mapping.tolist() == [8]


def test_indices_are_one_dimensional_int64():
    for meta in (plan_prefill(holding(6, [5, 2]), CPU), plan_decode(holding(5, [5, 2], cur_len=5), CPU)):
        for name in ("positions", "slot_mapping", "kv_indices"):
            tensor = getattr(meta, name)
            assert tensor.dim() == 1, (
                f"{name} has shape {tuple(tensor.shape)}; it must be one-dimensional, a plain list of indices"
            )
            assert tensor.dtype == torch.int64, f"{name} is {tensor.dtype}; torch indexes with int64"


def test_after_a_prefill_of_t_tokens_cur_len_is_t():
    request = holding(6, [5, 2])
    slots = torch.tensor(request.slot_indices[:6])
    PagedSequence(request, None, None).commit(ForwardMeta(torch.arange(6), slots, slots, is_prefill=True))
    assert request.cur_len == 6, f"cur_len is {request.cur_len} after 6 tokens; the token just chosen has no KV yet"


def test_a_decode_adds_one_to_cur_len():
    request = holding(5, [5, 2], cur_len=5)
    slots = torch.tensor(request.slot_indices[:6])
    PagedSequence(request, None, None).commit(ForwardMeta(torch.tensor([5]), slots[5:], slots, is_prefill=False))
    assert request.cur_len == 6, f"cur_len is {request.cur_len}; a decode writes the KV of one token"
