"""Lesson 2. The allocator: allocating, freeing, and rejecting bad calls without changing anything."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from mini_engine.base.errors import OutOfBlocks, UserError
from mini_engine.kv.allocator import BlockAllocator
from tests.support import must_raise, refused


def state(allocator):
    return list(allocator.free_blocks), set(allocator.held)


def four_blocks(held=()):
    """Return an allocator of four blocks of which `held` are allocated, built by hand."""
    allocator = BlockAllocator(4, reserved=0)
    allocator.free_blocks = [b for b in allocator.free_blocks if b not in held]
    allocator.held = set(held)
    return allocator


def unchanged(allocator, before, why):
    """Check that a refused call left the allocator as it was."""
    free, held = state(allocator)
    assert (free, held) == before, f"free_blocks and held: {why}"


@pytest.mark.task(2)
def test_blocks_handed_out_are_no_longer_free():
    allocator = four_blocks()
    first = allocator.alloc_blocks(2)
    second = allocator.alloc_blocks(2)
    assert sorted(first + second) == [0, 1, 2, 3], "each of the four blocks must be handed out once"
    assert allocator.free_blocks == [], "all four blocks are handed out"


@pytest.mark.task(2)
def test_blocks_handed_out_are_held():
    allocator = four_blocks()
    got = allocator.alloc_blocks(3)
    assert allocator.held == set(got), (
        "`held` records what was handed out: without it, `free` cannot tell a double free"
    )


@pytest.mark.task(2)
def test_the_last_block_freed_is_the_first_handed_out():
    allocator = BlockAllocator(6, reserved=0)
    allocator.free_blocks, allocator.held = [4, 1, 3], {0, 2, 5}
    got = [*allocator.alloc_blocks(1), *sorted(allocator.alloc_blocks(2))]
    assert got == [3, 1, 4], "free_blocks is [4, 1, 3]: the last entry is handed out next"


@pytest.mark.task(2)
def test_every_block_is_handed_out_block_0_included():
    got = sorted(BlockAllocator.for_slots(48, 16).alloc_blocks(3))
    assert got == [0, 1, 2], "48 slots are three blocks of 16"


@pytest.mark.task(2)
def test_alloc_of_zero_blocks_is_an_empty_list():
    allocator = four_blocks()
    before = state(allocator)
    got = allocator.alloc_blocks(0)
    assert got == [], "0 blocks are []: note that a list's [-0:] is the whole list"
    unchanged(allocator, before, "alloc_blocks(0) changes nothing")


@pytest.mark.task(2)
def test_a_negative_number_of_blocks_is_refused():
    allocator = four_blocks()
    before = state(allocator)
    with must_raise(ValueError, "alloc_blocks(-1): a negative number of blocks is a mistake of the caller"):
        allocator.alloc_blocks(-1)
    unchanged(allocator, before, "alloc_blocks(-1) was refused, and must change nothing")


@pytest.mark.task(2)
@pytest.mark.parametrize("n", [4, 5, 9])
def test_exhaustion_changes_nothing(n):
    allocator = four_blocks([0])
    before = state(allocator)
    with must_raise(OutOfBlocks, f"alloc_blocks({n}), and three blocks are free"):
        allocator.alloc_blocks(n)
    unchanged(allocator, before, "an allocation that fails must leave the free list as it was")


@pytest.mark.task(2)
def test_the_last_free_block_can_be_had():
    allocator = four_blocks([0])
    try:
        got = allocator.alloc_blocks(3)
    except OutOfBlocks as error:
        raise AssertionError("three blocks are free, and alloc_blocks(3) was refused") from error
    assert sorted(got) == [1, 2, 3], "alloc_blocks(3)"


@pytest.mark.task(3)
def test_freed_blocks_can_be_handed_out_again():
    allocator = four_blocks([0, 1, 2, 3])
    allocator.free([2, 0])
    assert sorted(allocator.free_blocks) == [0, 2], (
        "free([2, 0]): free_blocks must hold what is free after two of four blocks came back"
    )
    assert allocator.held == {1, 3}, "free([2, 0]): blocks 0 and 2 are no longer held"


@pytest.mark.task(3)
@pytest.mark.parametrize("freed", [(0, 2), (2, 0), (1, 2)])
def test_blocks_freed_go_to_the_end_of_the_free_list(freed):
    allocator = four_blocks([0, 1, 2])
    for block in freed:
        allocator.free((block,))
    want = [3, *freed]
    assert allocator.free_blocks == want, (
        f"blocks are handed out from the end, and the last one freed comes first: block 3 was free, then {freed[0]} was"
        f" freed, then {freed[1]}"
    )


@pytest.mark.task(3)
def test_freeing_no_block_changes_nothing():
    allocator = four_blocks([0, 1])
    before = state(allocator)
    allocator.free([])
    unchanged(allocator, before, "free([]) changes nothing")


@pytest.mark.task(3)
def test_free_leaves_the_callers_list_alone():
    allocator, blocks = four_blocks([0, 1, 2]), [2, 0]
    allocator.free(blocks)
    assert blocks == [2, 0], "the list belongs to the caller"


@pytest.mark.task(3)
def test_a_double_free_is_refused():
    allocator = four_blocks([0, 1])
    allocator.free([1])
    with must_raise(ValueError, "block 1 was freed before; on the free list twice, two requests would share it"):
        allocator.free([1])
    count = allocator.free_blocks.count(1)
    assert count == 1, f"block 1 is on the free list {count} times: two requests would share it"


@pytest.mark.task(3)
@pytest.mark.parametrize(
    "blocks, why",
    [
        pytest.param([1, 1], "block 1 is named twice", id="a block is named twice"),
        pytest.param([0, 1, 1], "block 1 is named twice", id="a block is named twice, after another"),
        pytest.param([0, 5], "block 5 is not in the pool", id="a block is not in the pool"),
        pytest.param([-1], "there is no block -1", id="a negative id"),
        pytest.param([3], "block 3 is free already", id="a block is not held"),
        pytest.param([0, 3], "block 3 is free already", id="a block is not held, after another"),
    ],
)
def test_a_bad_free_is_refused_and_changes_nothing(blocks, why):
    allocator = four_blocks([0, 1])
    before = state(allocator)
    with must_raise(ValueError, f"blocks 0 and 1 are held; free({blocks}): {why}"):
        allocator.free(blocks)
    unchanged(allocator, before, f"free({blocks}) was refused, and was carried out in part")


@pytest.mark.parametrize("num_slots, block_size", [(100, 16), (8, 16), (16, 0), (0, 16), (-16, 16)])
def test_slots_that_do_not_divide_into_blocks_are_refused(num_slots, block_size):
    with refused(ValueError, f"{num_slots} {block_size}"):
        BlockAllocator.for_slots(num_slots, block_size)


@pytest.mark.parametrize(
    "num_blocks, block_size, reserved", [(0, 16, 0), (-1, 16, 0), (4, 0, 0), (4, 16, 5), (4, 16, -1)]
)
def test_impossible_sizes_are_refused(num_blocks, block_size, reserved):
    with refused(UserError, f"{num_blocks} {block_size} {reserved}"):
        BlockAllocator(num_blocks, block_size, reserved)


def test_usable_blocks_are_all_but_the_reserved_ones():
    allocator = BlockAllocator(8, 4, reserved=1)
    allocator.alloc_blocks(3)
    assert allocator.num_usable == 7, "block 0 is reserved: 7 of 8 blocks can be held, however many are held now"
    with must_raise(OutOfBlocks, "five blocks are wanted, and four of the seven are free"):
        allocator.alloc_blocks(5)


class AllocatorMachine(RuleBasedStateMachine):
    """Allocates and frees blocks in any order and grouping; hypothesis searches for an order that fails."""

    def __init__(self):
        super().__init__()
        self.allocator, self.model = BlockAllocator(10, 4, reserved=0), set()

    grants = Bundle("grants")

    @rule(target=grants, n=st.integers(0, 12))
    def take(self, n):
        if n > 10 - len(self.model):
            before = state(self.allocator)
            with must_raise(OutOfBlocks, f"task 2: alloc_blocks({n}), {10 - len(self.model)} are free"):
                self.allocator.alloc_blocks(n)
            unchanged(self.allocator, before, f"task 2: alloc_blocks({n}) was refused, and must change nothing")
            return multiple()
        blocks = self.allocator.alloc_blocks(n)
        assert self.model.isdisjoint(blocks), f"task 2: alloc_blocks({n}) gave {blocks}, and {self.model} are held"
        self.model.update(blocks)
        return blocks

    @rule(blocks=consumes(grants))
    def give_back(self, blocks):
        self.allocator.free(blocks)
        self.model.difference_update(blocks)

    @rule(block=st.integers(-2, 12))
    def give_back_what_is_not_held(self, block):
        if block not in self.model:
            with must_raise(ValueError, f"task 3: free([{block}]), and held are {self.model or '{}'}"):
                self.allocator.free([block])

    @invariant()
    def free_and_held_make_up_the_pool(self):
        free, held = state(self.allocator)
        assert held == self.model, "what was handed out and not freed is held"
        assert sorted([*free, *held]) == list(range(10)), "every block is either free or held"


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=settings.default.max_examples // 4, stateful_step_count=25)
