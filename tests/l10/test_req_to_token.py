"""Lesson 10. The table on the device: a row per request, a slot per position, and the plan made from it."""

from array import array

import pytest
import torch

from lessons.l10_device.req_to_token import PADDING_ROW, ReqToTokenPool
from lessons.l10_device.slot_allocator import TokenToKVPoolAllocator
from mini_engine.base.errors import OutOfBlocks, UserError
from mini_engine.engine.runner import plan_step
from mini_engine.engine.scheduler import Chunk
from tests.shared.gpu_helpers import Decoding, NoReading


def slots_of(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def refused(pool, error, why, call):
    before = (pool.req_to_token.tolist(), list(pool.free_rows), set(pool.held))
    try:
        call()
    except error:
        pass
    else:
        pytest.fail(f"the call must raise {error.__name__}: {why}")
    assert (pool.req_to_token.tolist(), pool.free_rows, pool.held) == before, "a rejected call must change nothing"


def test_rows_begin_at_1_because_row_0_is_padding():
    pool = ReqToTokenPool(3, 4)
    assert pool.alloc(2) == [1, 2] and pool.alloc() == [3], "row 0 is padding and must not be handed out"
    assert pool.req_to_token.shape == (4, 4) and pool.req_to_token.dtype == torch.int32


def test_more_rows_than_there_are_is_refused():
    pool = ReqToTokenPool(3, 4)
    pool.alloc(2)
    refused(pool, OutOfBlocks, "need 2 rows, 1 free of 3", lambda: pool.alloc(2))
    refused(pool, ValueError, "-1 rows", lambda: pool.alloc(-1))
    assert pool.alloc(0) == [] and pool.available_size() == 1


def test_what_is_written_is_read():
    pool = ReqToTokenPool(3, 6)
    a, b = pool.alloc(2)
    pool.write(a, 0, slots_of(7, 8, 9))
    pool.write(b, 0, slots_of(4))
    pool.write(a, 3, slots_of(2))
    assert pool.read(a, 4).tolist() == [7, 8, 9, 2], "each slot must be at its position"
    assert pool.read(b, 1).tolist() == [4] and pool.read(b, 0).tolist() == []


def test_a_freed_row_comes_back_and_points_at_padding():
    pool = ReqToTokenPool(2, 4)
    a, b = pool.alloc(2)
    pool.write(a, 0, slots_of(7, 8, 9))
    pool.free(a)
    assert pool.req_to_token[a].tolist() == [0, 0, 0, 0], (
        "a freed row must not point at slots: they will soon be another request's"
    )
    assert pool.alloc() == [a] and pool.available_size() == 0 and b in pool.held


CALLS = {
    "free": lambda pool, row: pool.free(row),
    "write": lambda pool, row: pool.write(row, 0, slots_of(1)),
    "read": lambda pool, row: pool.read(row, 1),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("row", [0, 2, 3, -1, 4], ids=["padding", "freed", "never given", "-1", "past the end"])
def test_a_row_that_is_not_held_is_refused(row, call):
    pool = ReqToTokenPool(3, 4)
    pool.alloc(2)
    pool.free(2)
    refused(pool, ValueError, "not held", lambda: call(pool, row))


@pytest.mark.parametrize(
    "call",
    [
        lambda pool: pool.write(1, 3, slots_of(1, 2)),
        lambda pool: pool.write(1, -1, slots_of(1)),
        lambda pool: pool.write(1, 5, slots_of()),
        lambda pool: pool.write(1, 0, torch.tensor([1, 2])),
        lambda pool: pool.write(1, 0, slots_of(1, 2).view(1, 2)),
        lambda pool: pool.read(1, 5),
        lambda pool: pool.read(1, -1),
    ],
    ids=["too long", "-1", "past the end", "int64", "two dimensions", "read too long", "read -1"],
)
def test_what_does_not_fit_a_row_is_refused(call):
    pool = ReqToTokenPool(2, 4)
    pool.alloc()
    refused(pool, ValueError, "a row has four slots, int32", lambda: call(pool))


@pytest.mark.parametrize(("reqs", "length"), [(0, 4), (2, 0), (-1, 4)])
def test_an_empty_table_is_refused(reqs, length):
    with pytest.raises(UserError):
        ReqToTokenPool(reqs, length)


def test_clear_frees_every_row():
    pool = ReqToTokenPool(3, 4)
    pool.alloc(2)
    pool.write(1, 0, slots_of(5))
    pool.clear()
    refused(pool, ValueError, "not held", lambda: pool.free(1))
    assert pool.available_size() == 3 and not pool.req_to_token.any() and pool.alloc(3) == [1, 2, 3]


# A step's plan, made from the table


def table_with(lengths, page_size):
    """Return a table whose requests hold pages in mixed order, their rows, and lesson 5's chunks for the same pages."""
    allocator = TokenToKVPoolAllocator(40 * page_size, page_size, need_sort=False)
    pages = allocator.alloc(40 * page_size).view(40, page_size)
    pages = pages[torch.randperm(40, generator=torch.Generator().manual_seed(1))]
    pool = ReqToTokenPool(9, -(-max(lengths) // page_size) * page_size)
    rows, chunks = pool.alloc(len(lengths)), []
    for row, length in zip(rows, lengths, strict=True):
        mine, pages = pages[: -(-length // page_size)], pages[-(-length // page_size) :]
        pool.write(row, 0, mine.flatten())
        blocks = array("i", (mine[:, 0] // page_size).tolist())
        chunks.append(Chunk(Decoding(length), length - 1, length, blocks))
    return pool, rows, chunks


@pytest.mark.task(5)
@pytest.mark.parametrize("page_size", [1, 4])
def test_the_plan_made_on_the_device_equals_lesson_5_s(page_size):
    lengths = [5, 1, 8, 9]
    pool, rows, chunks = table_with(lengths, page_size)
    want = plan_step(chunks, page_size, torch.device("cpu")).meta
    got = pool.plan_decode(torch.tensor(rows), slots_of(*lengths), page_size)
    assert got.block_size == page_size
    for name in ("positions", "slot_mapping", "cu_seqlens_q", "seq_lens_kv", "block_table"):
        a, b = getattr(got, name), getattr(want, name)
        assert a.dtype == b.dtype, f"{name} is {a.dtype}, lesson 5's is {b.dtype}"
        assert a.tolist() == b.tolist(), f"{name} is {a.tolist()}, lesson 5's is {b.tolist()}"


@pytest.mark.task(5)
def test_padding_rows_write_into_slot_0_and_feed_no_query():
    pool, rows, _ = table_with([5, 2], 4)
    meta = pool.plan_decode(torch.tensor([*rows, PADDING_ROW, PADDING_ROW]), slots_of(5, 2, 0, 0), 4)
    assert meta.slot_mapping[2:].tolist() == [0, 0], "padding rows must write into the padding slot"
    sums = meta.cu_seqlens_q.tolist()
    why = "padding rows were given a query each" if sums == [0, 1, 2, 3, 4] else "after the last query the sum stays 2"
    assert sums == [0, 1, 2, 2, 2], f"cu_seqlens_q of two queries and two padding rows: {why}"
    assert meta.seq_lens_kv.tolist() == [5, 2, 0, 0], "the plan has the lengths as they are, 0 for padding rows"
    assert meta.positions.tolist() == [4, 1, 0, 0], "a padding row must not be at position -1"
    assert not meta.block_table[2:].any(), "the table of a padding row must name the padding page only"


@pytest.mark.task(5)
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_plan_reads_no_value(page_size):
    pool, rows, _ = table_with([5, 2], page_size)
    rows, lengths = torch.tensor([*rows, PADDING_ROW]), slots_of(5, 2, 0)
    with NoReading():
        pool.plan_decode(rows, lengths, page_size)
    assert (rows.tolist(), lengths.tolist()) == ([1, 2, 0], [5, 2, 0]), (
        "the plan must not change rows and lengths: the next step of the device loop reads them"
    )


@pytest.mark.task(5)
def test_a_plan_follows_the_table_and_the_lengths():
    pool, rows, _ = table_with([8, 8], 4)
    rows, lengths = torch.tensor(rows), slots_of(3, 8)
    first = pool.plan_decode(rows, lengths, 4)
    lengths += torch.tensor([1, -2])
    second = pool.plan_decode(rows, lengths, 4)
    slots = [pool.read(1, 8)[[2, 3]].tolist(), pool.read(2, 8)[[7, 5]].tolist()]
    assert [first.slot_mapping.tolist(), second.slot_mapping.tolist()] == [[a, b] for a, b in zip(*slots, strict=True)]
    assert second.positions.tolist() == [3, 5], "each step's plan is made from the lengths of that step"
