"""Lesson 3. The null block, block tables, the waste they report, and copies between blocks."""

import functools
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mini_engine.base.errors import OutOfBlocks, UserError
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.block_table import BlockTable, fragmentation_ratio, waste_ratio
from mini_engine.kv.block_tensor import KvPool
from tests.support import SMALL, must_raise, refused


def table_of(blocks, num_tokens, block_size=4, spare=()):
    """Return a table that holds `blocks`, built by hand; its allocator hands out `spare`, in this order."""
    allocator = BlockAllocator(10, block_size)
    allocator.free_blocks, allocator.held = list(spare)[::-1], set(blocks)
    table = BlockTable(allocator)
    table.blocks, table.num_tokens = list(blocks), num_tokens
    return table


def no_kernel(*_):
    raise AssertionError("these tests compute no attention")


def pool_of(num_blocks=6, block_size=4):
    pool = KvPool(SMALL, num_blocks, block_size, no_kernel)
    for layer in range(3):
        shape = pool.K[layer].shape
        pool.K[layer].copy_(torch.randn(shape, generator=torch.Generator().manual_seed(layer)))
        pool.V[layer].copy_(torch.randn(shape, generator=torch.Generator().manual_seed(9 + layer)))
    return pool


def cleared_pool(num_blocks=6, block_size=4):
    """Return a pool of zeros; a new pool is not cleared and holds whatever the memory held before."""
    pool = KvPool(SMALL, num_blocks, block_size, no_kernel)
    for layer in (*pool.K, *pool.V):
        layer.zero_()
    return pool


def test_block_0_is_never_handed_out():
    allocator = BlockAllocator(8, 4)
    assert sorted(allocator.alloc_blocks(7)) == [1, 2, 3, 4, 5, 6, 7], (
        "block 0 is the null block; only 1 … 7 are handed out"
    )
    with pytest.raises(OutOfBlocks):
        allocator.alloc_blocks(1)


def test_block_0_cannot_be_freed():
    allocator = BlockAllocator(8, 4)
    with pytest.raises(ValueError):
        allocator.free([0])
    assert 0 not in allocator.free_blocks


@pytest.mark.task(1)
def test_append_takes_a_block_only_when_the_last_one_is_full():
    table = table_of([7], 2, spare=[3, 9])
    table.append(2)
    assert (table.blocks, table.num_tokens) == ([7], 4), "two more tokens fit in the block the table holds"
    table.append(1)
    assert (table.blocks, table.num_tokens) == ([7, 3], 5), "the fifth token needs a second block of four"
    assert table.allocator.free_blocks == [9], "one block was missing, so one is taken"


@pytest.mark.task(1)
def test_append_can_take_several_blocks_at_once():
    table = table_of([], 0, spare=[5, 1, 8])
    table.append(9)
    assert (table.blocks, table.num_tokens) == ([5, 1, 8], 9), "9 tokens need three blocks of four, in this order"


@pytest.mark.task(1)
def test_append_counts_the_free_slots_of_the_last_block():
    table = table_of([7], 3, spare=[5, 1, 8])
    table.append(5)
    assert (table.blocks, table.num_tokens) == ([7, 5], 8), (
        "3 + 5 tokens need two blocks: the first of the new tokens fits in the block the table holds"
    )


@pytest.mark.task(1)
def test_appending_nothing_changes_nothing():
    table = table_of([7], 4, spare=[5])
    table.append(0)
    assert (table.blocks, table.num_tokens) == ([7], 4), "no token more, no block more, even if the last block is full"


@pytest.mark.task(1)
def test_an_append_that_fails_changes_nothing():
    table = table_of([7], 3, spare=[2])
    with must_raise(OutOfBlocks, "6 more tokens need two blocks, and one is free"):
        table.append(6)
    assert (table.blocks, table.allocator.free_blocks) == ([7], [2]), (
        "an append that fails must take no block, or it leaks: (blocks, free blocks)"
    )
    assert table.num_tokens == 3, "an append that fails adds no token"


@pytest.mark.task(1)
def test_a_negative_append_is_refused():
    table = table_of([7, 2], 6)
    with must_raise(ValueError, "append(-1) must be refused; only truncate removes tokens"):
        table.append(-1)
    assert (table.blocks, table.num_tokens) == ([7, 2], 6), "a refused append changes nothing"


@pytest.mark.task(2)
@pytest.mark.parametrize("position, place", [(0, (7, 0)), (3, (7, 3)), (4, (2, 0)), (6, (2, 2))])
def test_lookup_gives_block_and_offset(position, place):
    assert table_of([7, 2], 7).lookup(position) == place, (
        f"token {position} of blocks [7, 2], 4 slots each: (block id, offset within the block)"
    )


@pytest.mark.task(2)
@pytest.mark.parametrize("position", [-1, -7])
def test_lookup_before_the_first_token_is_an_index_error(position):
    with must_raise(IndexError, f"lookup({position}) must be refused; Python's lists would take it from the end"):
        table_of([7, 2], 7).lookup(position)


@pytest.mark.task(2)
@pytest.mark.parametrize("position", [7, 8, 100])
def test_lookup_past_the_last_token_is_an_index_error(position):
    where = "a slot of the last block, but no token is in it" if position == 7 else "past the blocks"
    with must_raise(IndexError, f"the table has 7 tokens, 0 … 6; position {position} is {where}"):
        table_of([7, 2], 7).lookup(position)


@pytest.mark.task(2)
def test_lookup_in_an_empty_table_is_an_index_error():
    with must_raise(IndexError, "an empty table has no token 0"):
        table_of([], 0).lookup(0)


def test_slots_are_block_times_size_plus_offset():
    assert table_of([7, 2], 7).slots(2, 6) == [30, 31, 8, 9]


@pytest.mark.task(3)
@pytest.mark.parametrize(
    "keep, blocks, returned",
    [(0, [], [7, 2, 5]), (2, [7], [2, 5]), (4, [7], [2, 5]), (5, [7, 2], [5]), (9, [7, 2, 5], []), (8, [7, 2], [5])],
)
def test_truncate_frees_the_blocks_that_are_no_longer_needed(keep, blocks, returned):
    table = table_of([7, 2, 5], 9)
    table.truncate(keep)
    what = f"truncate({keep}) of 9 tokens in blocks [7, 2, 5], 4 slots each"
    if table.blocks == blocks[:-1]:
        what += ": the last block needed was dropped, because it is only partly filled"
    assert table.blocks == blocks, f"{what}: keep the blocks that hold the first {keep} tokens, and no others"
    assert table.num_tokens == keep, "num_tokens is the number of tokens kept"
    assert sorted(table.allocator.free_blocks) == sorted(returned), "the other blocks go back to the allocator"


@pytest.mark.task(3)
@pytest.mark.parametrize("keep", [-1, 10, 12])
def test_truncate_to_an_impossible_length_is_refused(keep):
    table = table_of([7, 2, 5], 9)
    with must_raise(ValueError, f"truncate({keep}) must be refused: the table holds 9 tokens"):
        table.truncate(keep)
    assert (table.blocks, table.num_tokens, table.allocator.free_blocks) == ([7, 2, 5], 9, []), (
        "a refused truncate changes nothing: (blocks, num_tokens, free blocks)"
    )


def test_a_freed_table_can_be_used_again():
    allocator = BlockAllocator(4, 4)
    table = BlockTable(allocator)
    for _ in range(3):
        table.append(9)
        table.free()
        assert (table.blocks, table.num_tokens, allocator.num_free) == ([], 0, 3)
        table.free()


def test_fragmentation_is_partly_filled_over_allocated_blocks():
    tables = [table_of([1, 2, 3], 9), table_of([4, 5], 8), table_of([6], 1)]
    assert fragmentation_ratio(tables) == 2 / 6, "two of six blocks are partly filled"


def test_waste_is_unused_over_allocated_slots():
    tables = [table_of([1, 2, 3], 9), table_of([4, 5], 8), table_of([6], 1)]
    assert waste_ratio(tables) == 6 / 24, "18 of 24 slots hold a token, so 6 are unused"


def test_the_ratios_are_0_if_nothing_is_allocated():
    assert fragmentation_ratio([]) == waste_ratio([]) == 0.0
    assert fragmentation_ratio([table_of([], 0)]) == waste_ratio([table_of([], 0)]) == 0.0


@pytest.mark.parametrize(
    "size, values",
    [
        ((0, 4), "0 4"),
        ((-1, 4), "-1"),
        ((6, 0), "6 0"),
        ((6.0, 4), "6.0"),
        ((2**40, 16), "6291456.0"),
        ((10**18, 16), ""),
        ((6, 10**30), ""),
    ],
)
def test_an_impossible_pool_is_refused_in_one_sentence(size, values):
    with refused(UserError, values):
        KvPool(SMALL, *size, no_kernel)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="NOT CHECKED: reads memory in use from Linux's /proc")
def test_a_new_pool_takes_no_memory_until_it_is_written():
    def resident():
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.split("VmRSS:")[1].split()[0]) * 1024

    before = resident()
    pool = KvPool(SMALL, 2**16, 16, no_kernel)
    assert pool.bytes == 3 * 2**27, "large enough to be seen"
    assert resident() - before < pool.bytes / 4, "a pool that may never be full was filled: half a second for each GiB"


def test_a_new_pool_s_null_block_holds_zeros(monkeypatch):
    monkeypatch.setattr(torch, "empty", functools.partial(torch.full, fill_value=float("nan")))
    pool = KvPool(SMALL, 6, 4, no_kernel)
    assert all(layer[0].eq(0).all() and layer[1:].isnan().all() for layer in (*pool.K, *pool.V))


@pytest.mark.task(4)
def test_set_kv_writes_through_the_flat_view():
    pool = cleared_pool()
    k, v = torch.ones(2, 2, 8), torch.full((2, 2, 8), 2.0)
    k[1], v[1] = 3, 4
    pool.set_kv(1, torch.tensor([23, 4]), k, v)
    for name, layers, first, second in (("K", pool.K, 1, 3), ("V", pool.V, 2, 4)):
        written = {place: layers[1][place].unique().tolist() for place in [(5, 3), (1, 0)]}
        assert written == {(5, 3): [first], (1, 0): [second]}, (
            f"{name} at (block, offset): slot 23 is block 5, offset 3, and gets row 0; slot 4 is block 1, offset 0"
        )
        assert int(layers[1].count_nonzero()) == 2 * 16, f"set_kv wrote a slot of {name} that is not in slot_mapping"
        assert not layers[0].any(), f"set_kv(1, …) wrote {name} of another layer"


@pytest.mark.task(4)
@pytest.mark.parametrize(
    "k, v",
    [
        ((1, 2, 8), (2, 2, 8)),
        ((2, 2, 8), (2, 2, 4)),
        ((2, 1, 8), (2, 2, 8)),
        ((3, 2, 8), (3, 2, 8)),
        ((2, 2, 8), (2, 8)),
    ],
)
def test_set_kv_refuses_mismatched_shapes_and_writes_nothing(k, v):
    pool = cleared_pool()
    with must_raise(ValueError, f"k {k} and v {v} for two slots: both must be (2, 2, 8), or torch broadcasts them"):
        pool.set_kv(0, torch.tensor([4, 5]), torch.ones(k), torch.ones(v))
    assert not pool.K[0].any() and not pool.V[0].any(), "a refused write writes nothing, neither K nor V"


@pytest.mark.task(4)
@pytest.mark.parametrize("slots", [[4, 24], [-1, 4]])
def test_set_kv_refuses_a_slot_outside_the_pool_and_writes_nothing(slots):
    pool = cleared_pool()
    with must_raise(ValueError, f"slots {slots} of a pool whose slots are 0 … 23"):
        pool.set_kv(0, torch.tensor(slots), torch.ones(2, 2, 8), torch.ones(2, 2, 8))
    assert not pool.K[0].any() and not pool.V[0].any(), "the refused write was carried out in part"


@pytest.mark.task(4)
def test_set_kv_on_a_device_does_not_wait_to_check_the_slots():
    pool, nowhere = KvPool(SMALL, 6, 4, no_kernel, device="meta"), torch.ones(2, 2, 8, device="meta")
    try:  # a tensor on device "meta" has no values: reading one raises, where a CUDA device would wait
        pool.set_kv(0, torch.tensor([4, 5]).to("meta"), nowhere, nowhere)
    except RuntimeError as error:
        error.add_note(
            "set_kv read the slots of a pool on a device: every layer would wait; check_slots reads the CPU's only"
        )
        raise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_pool_has_the_bytes_of_all_its_blocks(dtype):
    bytes_a_block = 4 * SMALL.kv_bytes_per_token(dtype)
    assert KvPool(SMALL, 6, 4, no_kernel, dtype).bytes == 6 * bytes_a_block, "K and V, in the pool's dtype"


@pytest.mark.task(5)
def test_copy_blocks_copies_every_layer():
    pool = pool_of()
    before = [layer.clone() for layer in (*pool.K, *pool.V)]
    pool.copy_blocks([2, 4], [5, 1])
    names = (f"{name} of layer {layer}" for name in "KV" for layer in range(3))
    for name, layer, old in zip(names, (*pool.K, *pool.V), before, strict=True):
        assert torch.equal(layer[5], old[2]) and torch.equal(layer[1], old[4]), (
            f"{name}: blocks 5 and 1 must hold what blocks 2 and 4 hold, in every layer"
        )
        assert torch.equal(layer[[0, 2, 3, 4]], old[[0, 2, 3, 4]]), f"{name}: a block that is no target has changed"


@pytest.mark.task(5)
def test_a_chain_of_copies_reads_before_it_writes():
    pool = pool_of()
    one, two = pool.K[0][1].clone(), pool.K[0][2].clone()
    pool.copy_blocks([1, 2], [2, 3])
    assert torch.equal(pool.K[0][2], one), "block 2 must hold what block 1 held"
    assert torch.equal(pool.K[0][3], two), "block 3 must hold what block 2 held before the call, not what it holds now"


@pytest.mark.task(5)
def test_two_blocks_can_swap():
    pool = pool_of()
    one, two = pool.V[1][1].clone(), pool.V[1][2].clone()
    pool.copy_blocks([1, 2], [2, 1])
    swapped = torch.equal(pool.V[1][1], two) and torch.equal(pool.V[1][2], one)
    assert swapped, "1 → 2 and 2 → 1 in one call: each must hold what the other held before the call"


@pytest.mark.task(5)
def test_one_block_can_be_copied_to_several():
    pool = pool_of()
    one = pool.K[0][1].clone()
    pool.copy_blocks([1, 1], [4, 5])
    copied = torch.equal(pool.K[0][4], one) and torch.equal(pool.K[0][5], one)
    assert copied, "only targets must differ: block 1 is copied to 4 and to 5"


@pytest.mark.task(5)
def test_copying_no_blocks_is_allowed():
    pool = pool_of()
    before = [layer.clone() for layer in (*pool.K, *pool.V)]
    pool.copy_blocks([], [])
    assert all(torch.equal(a, b) for a, b in zip(before, (*pool.K, *pool.V), strict=True)), "nothing was to be copied"


@pytest.mark.task(5)
@pytest.mark.parametrize(
    "sources, targets, why",
    [
        pytest.param([1], [2, 3], "lengths differ", id="lengths differ"),
        pytest.param([1, 2], [3, 3], "block 3 is a target twice", id="a target is named twice"),
        pytest.param(
            [1, 2], [4, 0], "block 0 is the null block; a copy would fill it", id="the null block is a target"
        ),
        pytest.param([0], [1], "block 0 is the null block; it holds no request's KV", id="the null block is a source"),
        pytest.param([1, 6], [2, 1], "the pool's blocks end at 5", id="a source past the end of the pool"),
        pytest.param([1, 2], [3, 6], "the pool's blocks end at 5", id="a target past the end of the pool"),
        pytest.param([-1], [1], "torch would take -1 for the last block", id="a negative source"),
        pytest.param([1], [-1], "torch would take -1 for the last block", id="a negative target"),
    ],
)
def test_an_impossible_copy_is_refused_and_copies_nothing(sources, targets, why):
    pool = pool_of()
    before = [layer.clone() for layer in (*pool.K, *pool.V)]
    with must_raise(ValueError, f"copy_blocks({sources}, {targets}) must be refused: {why}"):
        pool.copy_blocks(sources, targets)
    same = all(torch.equal(a, b) for a, b in zip(before, (*pool.K, *pool.V), strict=True))
    assert same, f"copy_blocks({sources}, {targets}) was refused, but copied something first"


class TableMachine(RuleBasedStateMachine):
    """Grows and shrinks three tables on one small pool; a list of token counts is the model."""

    def __init__(self):
        super().__init__()
        self.allocator = BlockAllocator(9, 4)
        self.tables, self.counts = [BlockTable(self.allocator) for _ in range(3)], [0, 0, 0]

    def blocks_of(self, count):
        return -(-count // 4)

    @rule(which=st.integers(0, 2), count=st.integers(0, 14))
    def append(self, which, count):
        need = self.blocks_of(self.counts[which] + count) - self.blocks_of(self.counts[which])
        if need > 8 - sum(map(self.blocks_of, self.counts)):
            with pytest.raises(OutOfBlocks):
                self.tables[which].append(count)
        else:
            self.tables[which].append(count)
            self.counts[which] += count

    @rule(which=st.integers(0, 2), share=st.floats(0, 1))
    def truncate(self, which, share):
        self.counts[which] = int(self.counts[which] * share)
        self.tables[which].truncate(self.counts[which])

    @invariant()
    def every_token_has_a_slot_of_its_own(self):
        slots = [slot for t, n in zip(self.tables, self.counts, strict=True) for slot in t.slots(0, n)]
        assert len(slots) == len(set(slots)) == sum(self.counts)
        assert all(slot >= 4 for slot in slots), "a token was given a slot of the null block"

    @invariant()
    def free_and_held_make_up_the_pool(self):
        held = [block for table in self.tables for block in table.blocks]
        assert sorted(held + self.allocator.free_blocks) == list(range(1, 9))


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
