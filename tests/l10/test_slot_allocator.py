"""Lesson 10. The free list on the device: slots as int32 tensors, deferred frees, whole pages."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from lessons.l10_device.slot_allocator import TokenToKVPoolAllocator
from mini_engine.base.errors import OutOfBlocks, UserError


def slots_of(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def state(allocator):
    """Return everything that a rejected call must not change."""
    return (
        allocator.free_slots.tolist(),
        allocator.release_slots.tolist(),
        allocator.is_held.tolist(),
        [part.tolist() for part in allocator.deferred],
    )


def refused(allocator, error, why, call):
    before = state(allocator)
    try:
        call()
    except error:
        pass
    else:
        pytest.fail(f"the call must raise {error.__name__}: {why}")
    assert state(allocator) == before, "a rejected call must change nothing"


def test_lists_are_merged_only_when_the_free_one_is_too_short():
    allocator = TokenToKVPoolAllocator(8)
    allocator.free(allocator.alloc(3))
    assert allocator.free_slots.tolist() == [4, 5, 6, 7, 8], "a free must not copy the long list"
    assert allocator.release_slots.tolist() == [1, 2, 3] and allocator.available_size() == 8
    assert allocator.alloc(5).tolist() == [4, 5, 6, 7, 8], "free_slots had enough: no merge may happen"
    assert allocator.release_slots.tolist() == [1, 2, 3], "no merge was needed"
    assert allocator.alloc(1).tolist() == [1] and allocator.release_slots.tolist() == []


@pytest.mark.task(3)
def test_a_merge_empties_the_short_list_into_the_long_one():
    allocator = TokenToKVPoolAllocator(8)
    allocator.free_slots, allocator.release_slots = slots_of(6, 8), slots_of(7, 2)
    allocator.merge_and_sort_free()
    assert allocator.free_slots.tolist() == [2, 6, 7, 8], "the slots of both lists, the low ones first"
    assert allocator.release_slots.tolist() == [], "what was merged must not be handed out twice"
    assert allocator.free_slots.dtype == torch.int32, "free_slots must stay int32: kernels read the slots as they are"
    assert allocator.release_slots.dtype == torch.int32, "an empty release_slots must be int32 as well"
    assert allocator.available_size() == 4, "a merge neither finds nor loses a slot"


@pytest.mark.task(3)
def test_without_need_sort_a_merge_keeps_the_order():
    allocator = TokenToKVPoolAllocator(8, need_sort=False)
    allocator.free_slots, allocator.release_slots = slots_of(6, 8), slots_of(7, 2)
    allocator.merge_and_sort_free()
    assert allocator.free_slots.tolist() == [6, 8, 7, 2], (
        "need_sort is off: a merge must not sort, and the freed slots go after the others"
    )


@pytest.mark.task(3)
@pytest.mark.parametrize("free, released", [((), (5, 3)), ((2, 4), ()), ((), ())], ids=["none", "some", "no slots"])
def test_a_merge_of_an_empty_list_works(free, released):
    allocator = TokenToKVPoolAllocator(8)
    allocator.free_slots, allocator.release_slots = slots_of(*free), slots_of(*released)
    allocator.merge_and_sort_free()
    assert allocator.free_slots.tolist() == sorted(free + released), "the slots of both lists, one of which is empty"
    assert allocator.free_slots.dtype == allocator.release_slots.dtype == torch.int32, "no slots are int32 as well"
    assert len(allocator.release_slots) == 0


def test_a_freed_view_of_the_table_may_be_overwritten_at_once():
    """The usual caller frees a row of req_to_token and clears that row at once."""
    allocator = TokenToKVPoolAllocator(8)
    table = torch.zeros(2, 8, dtype=torch.int32)
    table[1, :3] = allocator.alloc(3)
    with allocator.free_group():
        allocator.free(table[1, :3])
        table[1] = 0
    assert sorted(allocator.alloc(8).tolist()) == list(range(1, 9)), "free must copy what it is given, not keep a view"


# Pages


@pytest.mark.parametrize("numbers", [(4,), (4, 5), (6, 7), (6, 7, 8, 9), (4, 5, 6, 7, 8), (4, 5, 6, 8)])
def test_edge_case_8_part_of_a_page_cannot_be_freed(numbers):
    allocator = TokenToKVPoolAllocator(12, 4)
    allocator.alloc(12)
    refused(allocator, ValueError, "whole pages", lambda: allocator.free(slots_of(*numbers)))


@pytest.mark.parametrize("need_sort", [True, False])
@pytest.mark.parametrize("page", [1, 4])
def test_edge_case_9_slots_are_int32_in_every_mode(page, need_sort):
    allocator = TokenToKVPoolAllocator(16, page, need_sort=need_sort)
    for given_as in (torch.int32, torch.int64):
        held = allocator.alloc(8)
        assert held.dtype == torch.int32, "slots must be int32"
        with allocator.free_group():
            allocator.free(held[:4].to(given_as))
        allocator.free(held[4:].to(given_as))
        assert allocator.release_slots.dtype == torch.int32, "freed slots must be int32"
        assert allocator.alloc(16).dtype == allocator.free_slots.dtype == torch.int32, (
            "slots must be int32 after a merge"
        )
        allocator.clear()


# Groups: edge cases 10 and 11


class Concatenations(TorchFunctionMode):
    """Counts the calls of torch.cat."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += getattr(func, "__name__", "") in ("cat", "concat", "concatenate", "hstack")
        return func(*args, **kwargs or {})


@pytest.mark.task(4)
def test_edge_case_10_an_exception_ends_the_group_and_loses_nothing():
    allocator = TokenToKVPoolAllocator(8)
    held = allocator.alloc(6)
    try:
        with allocator.free_group():
            allocator.free(held[:2])
            raise LookupError("in between")
    except LookupError:
        pass
    else:
        pytest.fail("free_group must pass the exception on: the caller has to know that its work failed")
    why = ": the group is still open after the exception" if allocator.open_groups else ""
    assert allocator.available_size() == 4, f"what was freed before the exception is free{why}"
    allocator.free(held[2:])
    assert allocator.available_size() == 8, "the group is closed: later frees do not wait for its end"


@pytest.mark.task(4)
def test_edge_case_11_frees_in_a_group_are_not_available_before_it_ends():
    allocator = TokenToKVPoolAllocator(8)
    held = allocator.alloc(6)
    with allocator.free_group():
        allocator.free(held[:4])
        assert (allocator.available_size(), allocator.num_deferred) == (2, 4), (
            "within the group the four freed slots are deferred, not available"
        )
        refused(allocator, OutOfBlocks, "need 3 slots, 2 free of 8, 4 wait", lambda: allocator.alloc(3))
        refused(allocator, ValueError, "slot 4 waits already", lambda: allocator.free(held[3:5]))
        assert allocator.alloc(2).tolist() == [7, 8], "what is free beside them can be taken"
    assert (allocator.available_size(), allocator.num_deferred) == (4, 0), (
        "(available, deferred): the four freed slots are available, and at the end of the group nothing is deferred"
    )


@pytest.mark.task(4)
def test_an_empty_group_does_nothing():
    allocator = TokenToKVPoolAllocator(8)
    before = state(allocator)
    with allocator.free_group(), allocator.free_group():
        pass
    assert state(allocator) == before, "a group without frees must change nothing"
    allocator.free(allocator.alloc(2))
    assert allocator.release_slots.tolist() == [1, 2], "and it must be closed afterwards"


@pytest.mark.task(4)
def test_edge_case_10_of_nested_groups_the_outermost_counts():
    allocator = TokenToKVPoolAllocator(8)
    held = allocator.alloc(6)
    with allocator.free_group():
        allocator.free(held[:2])
        with allocator.free_group():
            allocator.free(held[2:4])
        assert allocator.release_slots.tolist() == [], "the inner group's end is not the outer one's: all slots wait"
        assert allocator.num_deferred == 4, "a group within a group must keep what was freed before it began"
        allocator.free(held[4:])
    assert sorted(allocator.release_slots.tolist()) == [1, 2, 3, 4, 5, 6], "the outermost end returns each slot once"
    assert allocator.num_deferred == 0, "what was returned is no longer deferred, or the next group returns it again"
    assert allocator.release_slots.dtype == torch.int32 and allocator.free_slots.tolist() == [7, 8]


@pytest.mark.task(4)
def test_after_a_group_frees_are_available_at_once():
    allocator = TokenToKVPoolAllocator(8)
    held = allocator.alloc(6)
    with allocator.free_group():
        allocator.free(held[:2])
    allocator.free(held[2:4])
    assert allocator.release_slots.tolist() == [1, 2, 3, 4], "the group has ended: this free waits for nothing"
    with allocator.free_group():
        allocator.free(held[4:])
        assert allocator.release_slots.tolist() == [1, 2, 3, 4], "a second group collects frees like the first"
    assert allocator.release_slots.tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.task(4)
def test_a_group_is_appended_in_one_concatenation():
    allocator = TokenToKVPoolAllocator(8)
    held = allocator.alloc(8)
    group = allocator.free_group()
    group.__enter__()
    for slot in held.split(1):
        allocator.free(slot)
    with Concatenations() as concatenations:
        group.__exit__(None, None, None)
    assert concatenations.count <= 1, (
        f"{concatenations.count} concatenations for a group of 8 frees: each copies the list, so append all at once"
    )
    assert allocator.available_size() == 8


@pytest.mark.task(4)
def test_clear_frees_all_and_an_open_group_does_not_bring_slots_back_twice():
    allocator = TokenToKVPoolAllocator(8)
    held = allocator.alloc(6)
    with allocator.free_group():
        allocator.free(held[:4])
        allocator.clear()
        assert allocator.available_size() == 8
        refused(allocator, ValueError, "not held", lambda: allocator.free(slots_of(5)))
    assert allocator.release_slots.tolist() == [], (
        "clear freed all slots, those that waited for the group's end too: returning them again would free them twice"
    )
    assert allocator.alloc(8).tolist() == list(range(1, 9)), "each slot once"
    allocator.free(held[:1])
    assert allocator.available_size() == 1, "the group is closed"


# Everything at once


@pytest.mark.parametrize(
    ("page", "numbers"),
    [(1, (0,)), (1, (-1,)), (1, (9,)), (1, (2**32 + 1,)), (1, (3, 1)), (1, (3, 4, 3)), (1, (3.0,)), (4, range(12, 16))],
)
def test_what_is_not_held_cannot_be_freed(page, numbers):
    allocator = TokenToKVPoolAllocator(8, page)
    allocator.free(allocator.alloc(8)[:page])
    refused(
        allocator, ValueError, "it is padding, outside, free or twice", lambda: allocator.free(torch.tensor(numbers))
    )


@pytest.mark.parametrize(("size", "page"), [(10, 4), (3, 4), (0, 1), (8, 0), (-4, 4)])
def test_edge_case_12_a_size_that_is_not_whole_pages_is_refused(size, page):
    with pytest.raises(UserError):
        TokenToKVPoolAllocator(size, page)


@given(st.integers(1, 9), st.sampled_from([1, 1, 2, 5]), st.lists(st.tuples(st.integers(-1, 7), st.randoms())))
def test_each_slot_is_free_or_held_by_one(pages, page_size, steps):
    """Pages come and go at random: a number of pages to allocate, or -1 to free half of those held, in mixed order."""
    allocator, held = TokenToKVPoolAllocator(pages * page_size, page_size), list[list[int]]()
    for count, chance in steps:
        if count < 0:
            chance.shuffle(held)
            gone = [slot for page in held[: len(held) // 2] for slot in page]
            chance.shuffle(gone)
            allocator.free(slots_of(*gone))
            held = held[len(held) // 2 :]
        elif count > pages - len(held):
            refused(allocator, OutOfBlocks, "so many are not free", lambda n=count: allocator.alloc(n * page_size))
        else:
            held += allocator.alloc(count * page_size).view(count, page_size).tolist()
        for page in held:
            assert page == [page[0] // page_size * page_size + i for i in range(page_size)], f"{page} is not a page"
        free = allocator.free_slots.tolist() + allocator.release_slots.tolist()
        everything = sorted(free + [slot for page in held for slot in page])
        assert everything == list(range(page_size, (pages + 1) * page_size)), "free + held is not each slot once"


@pytest.mark.gpu
def test_the_lists_are_on_the_gpu():
    allocator = TokenToKVPoolAllocator(16, 4, device="cuda")
    held = allocator.alloc(8)
    with allocator.free_group():
        allocator.free(held)
    with pytest.raises(ValueError):
        allocator.free(held)
    assert allocator.alloc(16).device.type == "cuda" and allocator.available_size() == 0
