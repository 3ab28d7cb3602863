"""Lesson 2. The allocator: allocating, freeing, and rejecting bad calls without changing anything."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from mini_engine.errors import OutOfBlocks, UserError
from mini_engine.kv.allocator import BlockAllocator


def state(allocator):
    return list(allocator.free_blocks), set(allocator.held)


def four_blocks(held=()):
    """Return an allocator of four blocks of which `held` are allocated, built by hand."""
    allocator = BlockAllocator(4, reserved=0)
    allocator.free_blocks = [b for b in allocator.free_blocks if b not in held]
    allocator.held = set(held)
    return allocator


def test_blocks_handed_out_are_no_longer_free():
    allocator = four_blocks()
    first = allocator.alloc_blocks(2)
    second = allocator.alloc_blocks(2)
    assert sorted(first + second) == [0, 1, 2, 3], (
        f"{first} and {second}: each of the four blocks must be handed out once"
    )
    assert allocator.num_free == 0


def test_every_block_is_handed_out_block_0_included():
    assert sorted(BlockAllocator.for_slots(48, 16).alloc_blocks(3)) == [0, 1, 2], "48 slots are three blocks of 16"


def test_alloc_of_zero_blocks_is_an_empty_list():
    allocator = four_blocks()
    before = state(allocator)
    assert allocator.alloc_blocks(0) == [], "0 blocks are []: note that a list's [-0:] is the whole list"
    assert state(allocator) == before


def test_a_negative_number_of_blocks_is_refused():
    allocator = four_blocks()
    before = state(allocator)
    with pytest.raises(ValueError):
        allocator.alloc_blocks(-1)
    assert state(allocator) == before


def test_exhaustion_changes_nothing():
    allocator = four_blocks([0])
    before = state(allocator)
    with pytest.raises(OutOfBlocks):
        allocator.alloc_blocks(4)
    assert state(allocator) == before, "an allocation that fails must leave the free list as it was"


def test_freed_blocks_can_be_handed_out_again():
    allocator = four_blocks([0, 1, 2, 3])
    allocator.free([2, 0])
    assert allocator.num_free == 2, f"{allocator.num_free} free after two of four blocks came back"
    assert allocator.held == {1, 3} and sorted(allocator.free_blocks) == [0, 2]


@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param([1, 1], id="a block is named twice"),
        pytest.param([0, 1, 1], id="a block is named twice, after another"),
        pytest.param([0, 5], id="a block is not in the pool"),
        pytest.param([-1], id="a negative id"),
        pytest.param([3], id="a block is not held"),
    ],
)
def test_a_bad_free_is_refused_and_changes_nothing(blocks):
    allocator = four_blocks([0, 1])
    before = state(allocator)
    with pytest.raises(ValueError):
        allocator.free(blocks)
    assert state(allocator) == before, "the refused free was carried out in part"


def test_a_double_free_is_refused():
    allocator = four_blocks([0, 1])
    allocator.free([1])
    with pytest.raises(ValueError):
        allocator.free([1])
    assert allocator.free_blocks.count(1) == 1, "block 1 is on the free list twice: two requests would share it"


@pytest.mark.parametrize("num_slots, block_size", [(100, 16), (8, 16), (16, 0), (0, 16), (-16, 16)])
def test_slots_that_do_not_divide_into_blocks_are_refused(num_slots, block_size):
    with pytest.raises(ValueError, match=f"{num_slots} slots cannot be divided into blocks of {block_size}"):
        BlockAllocator.for_slots(num_slots, block_size)


@pytest.mark.parametrize(
    "num_blocks, block_size, reserved", [(0, 16, 0), (-1, 16, 0), (4, 0, 0), (4, 16, 5), (4, 16, -1)]
)
def test_impossible_sizes_are_refused(num_blocks, block_size, reserved):
    with pytest.raises(UserError, match=f"{num_blocks} blocks of {block_size} slots, {reserved} blocks reserved"):
        BlockAllocator(num_blocks, block_size, reserved)


def test_usable_blocks_are_all_but_the_reserved_ones():
    allocator = BlockAllocator(8, 4, reserved=1)
    allocator.alloc_blocks(3)
    assert allocator.num_usable == 7, "block 0 is reserved: 7 of 8 blocks can be held, however many are held now"
    with pytest.raises(OutOfBlocks, match="need 5 blocks, 4 free of 7"):
        allocator.alloc_blocks(5)


def test_100_000_random_operations_keep_free_and_held_disjoint_and_complete():
    allocator, model, chance = BlockAllocator(64, 4, reserved=0), set(), random.Random(0)
    everything = set(range(64))
    for step in range(100_000):
        if chance.random() < 0.5:
            n = chance.randrange(12)
            if n > 64 - len(model):
                with pytest.raises(OutOfBlocks):
                    allocator.alloc_blocks(n)
            else:
                got = allocator.alloc_blocks(n)
                assert len(set(got)) == n and model.isdisjoint(got), (
                    f"step {step}: {got} contains a block that is already held"
                )
                model.update(got)
        elif chance.random() < 0.1:
            wrong = [chance.randrange(-2, 70)]
            if wrong[0] not in model:
                with pytest.raises(ValueError):
                    allocator.free(wrong)
        else:
            some = chance.sample(sorted(model), min(len(model), chance.randrange(12)))
            allocator.free(some)
            model.difference_update(some)
        assert allocator.held == model, f"step {step}: the allocator lost track of which blocks are held"
        assert len(allocator.free_blocks) == 64 - len(model), (
            f"step {step}: a block was lost, or is on the free list twice"
        )
        assert set(allocator.free_blocks) == everything - model, f"step {step}: free and held must make up the pool"


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
            with pytest.raises(OutOfBlocks):
                self.allocator.alloc_blocks(n)
            assert state(self.allocator) == before
            return multiple()
        blocks = self.allocator.alloc_blocks(n)
        assert self.model.isdisjoint(blocks)
        self.model.update(blocks)
        return blocks

    @rule(blocks=consumes(grants))
    def give_back(self, blocks):
        self.allocator.free(blocks)
        self.model.difference_update(blocks)

    @rule(block=st.integers(-2, 12))
    def give_back_what_is_not_held(self, block):
        if block not in self.model:
            with pytest.raises(ValueError):
                self.allocator.free([block])

    @invariant()
    def free_and_held_make_up_the_pool(self):
        assert self.allocator.held == self.model
        assert sorted([*self.allocator.free_blocks, *self.model]) == list(range(10))


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
