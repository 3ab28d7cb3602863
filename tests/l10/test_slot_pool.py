"""Lesson 10. The pool by slot: a padding page, keys and values that differ in shape, and what the model reads of it."""

import pytest
import torch

from lessons.l10_device.pools import make_full_attention_net_mem_pool
from lessons.l10_device.req_to_token import ReqToTokenPool
from lessons.l10_device.slot_allocator import TokenToKVPoolAllocator
from mini_engine.attention.registry import load_kernel
from tests.support import oracle


def rows(count, heads, dim, seed=0):
    return torch.randn(count, heads, dim, generator=torch.Generator().manual_seed(seed))


def pool_of(*shape, size=8, layers=1, **options):
    """Return a pool filled with zeros: a new pool holds whatever was in memory before."""
    pool, _ = make_full_attention_net_mem_pool(size, layers, *shape, **options)
    for tensor in (*pool.blocks.K, *pool.blocks.V):
        tensor.zero_()
    return pool


def is_refused(pool, match, call):
    with pytest.raises(ValueError, match=match):
        call()
    assert not any(x.any() for x in (*pool.blocks.K, *pool.blocks.V)), "a rejected call must write nothing"


@pytest.mark.parametrize("page", [1, 4])
def test_the_padding_page_comes_on_top_of_the_size(page):
    pool = pool_of(2, 3, layers=2, page_size=page)
    assert pool.blocks.K[0].shape == pool.blocks.V[1].shape == (8 // page + 1, page, 2, 3), (
        "size counts slots for tokens only"
    )
    assert pool.size == 8 and pool.page_size == page
    assert pool.blocks.bytes == 2 * 2 * (8 + page) * 2 * 3 * 4


def test_edge_case_17_keys_and_values_may_differ_in_heads_and_dimensions():
    pool = pool_of(2, 6, 1, 4, layers=2)
    slots = torch.tensor([5, 1, 8], dtype=torch.int32)
    k, v = rows(3, 2, 6), rows(3, 1, 4, seed=1)
    pool.set_kv_buffer(1, slots, k, v)
    keys, values = pool.get_kv_buffer(1)
    assert torch.equal(keys[slots], k) and torch.equal(values[slots], v), "each comes back as it went in"
    assert not pool.get_key_buffer(0).any() and not pool.get_value_buffer(0).any(), "the other layer is untouched"
    assert not keys[[0, 2, 3, 4, 6, 7]].any(), "only the named slots are written"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(6, 2, 3), (2, 3, 2, 3), (6, 6), (2, 3, 6)])
def test_rows_may_come_in_any_leading_shape(shape, dtype):
    pool, k = pool_of(2, 3), rows(6, 2, 3)
    slots = torch.tensor([6, 2, 1, 4, 5, 8], dtype=dtype)
    pool.set_kv_buffer(0, slots.view(2, 3) if shape[0] == 2 else slots, k.view(shape), -k.view(shape))
    assert torch.equal(pool.get_key_buffer(0)[slots], k) and torch.equal(pool.get_value_buffer(0)[slots], -k)


@pytest.mark.parametrize(
    ("k", "v"),
    [
        (rows(2, 2, 3), rows(3, 2, 3)),
        (rows(3, 2, 3), rows(2, 2, 3)),
        (rows(4, 2, 3), rows(4, 2, 3)),
        (rows(3, 3, 2), rows(3, 2, 3)),
        (rows(3, 2, 3), rows(2, 3, 3)),
    ],
    ids=["short k", "short v", "too many", "k transposed", "v transposed"],
)
def test_edge_case_16_rows_that_do_not_fit_the_slots_are_refused(k, v):
    pool = pool_of(2, 3)
    is_refused(pool, "one row per slot", lambda: pool.set_kv_buffer(0, torch.tensor([1, 2, 3]), k, v))


@pytest.mark.parametrize("stray", [-1, 9, 100])
def test_a_slot_outside_the_pool_is_refused_and_minus_1_does_not_wrap(stray):
    pool, slots = pool_of(2, 3), torch.tensor([1, stray])
    is_refused(pool, "not in the pool", lambda: pool.set_kv_buffer(0, slots, rows(2, 2, 3), rows(2, 2, 3, seed=1)))


def test_many_rows_may_go_into_the_padding_slot():
    pool = pool_of(2, 3)
    pool.set_kv_buffer(0, torch.tensor([3, 0, 0, 0]), rows(4, 2, 3), rows(4, 2, 3))
    keys = pool.get_key_buffer(0)
    assert torch.equal(keys[3], rows(4, 2, 3)[0]) and not keys[[1, 2, 4, 5, 6, 7, 8]].any()


def test_the_buffers_are_views_by_slot_of_what_kernels_read_by_page():
    pool = pool_of(1, 2, 1, 3, layers=2, page_size=4)
    k, v = torch.arange(4.0).view(2, 1, 2), torch.arange(6.0).view(2, 1, 3)
    pool.set_kv_buffer(1, torch.tensor([5, 8], dtype=torch.int32), k, v)
    assert torch.equal(pool.blocks.K[1][1, 1], k[0]), "slot 5 is page 1, offset 1"
    assert torch.equal(pool.blocks.V[1][2, 0], v[1]), "slot 8 is page 2, offset 0"
    pool.get_kv_buffer(0)[0][4] = 7
    assert pool.blocks.K[0][1, 0].eq(7).all(), "a buffer is a view, so writing to it writes to the pool"


# Attention


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("kernel", ["reference", "torch"])
def test_attention_reads_the_slots_that_the_table_names(kernel, page):
    """Everything else in the pool is NaN, the padding page included."""
    lengths, size = [5, 1, 8], 32
    pool = pool_of(2, 16, size=size, page_size=page, kernel=load_kernel(kernel))
    allocator, table = TokenToKVPoolAllocator(size, page), ReqToTokenPool(4, 8)
    for tensor in (*pool.blocks.K, *pool.blocks.V):
        tensor.fill_(float("nan"))
    allocator.alloc(2 * page)  # another request's
    held, keys, values = table.alloc(3), [], []
    for row, length in zip(held, lengths, strict=True):
        slots = allocator.alloc(-(-length // page) * page)
        table.write(row, 0, slots)
        keys.append(rows(length, 2, 16, seed=row))
        values.append(rows(length, 2, 16, seed=row + 9))
        pool.set_kv_buffer(0, slots[:length], keys[-1], values[-1])
    q = rows(4, 4, 16, seed=7)
    lens = torch.tensor([*lengths, 0], dtype=torch.int32)
    meta = table.plan_decode(torch.tensor([*held, 0]), lens, page)
    out = pool.blocks.attend(0, q, meta)
    for s in range(3):
        want = oracle(q[s : s + 1], keys[s], values[s]).float()
        torch.testing.assert_close(out[s : s + 1], want, msg=lambda text, s=s: f"sequence {s}: {text}")
    assert not out[3].any(), "a padding row's output is zeros"


def test_attention_without_a_kernel_is_refused():
    table = ReqToTokenPool(1, 4)
    meta = table.plan_decode(torch.tensor(table.alloc()), torch.tensor([1], dtype=torch.int32), 1)
    with pytest.raises(ValueError):
        pool_of(2, 6).blocks.attend(0, rows(1, 2, 6), meta)


@pytest.mark.gpu
def test_the_pool_lives_on_the_gpu():
    pool = pool_of(2, 6, 1, 4, device="cuda")
    slots = torch.tensor([5, 1, 8], dtype=torch.int32, device="cuda")
    pool.set_kv_buffer(0, slots, rows(3, 2, 6).cuda(), rows(3, 1, 4).cuda())
    assert torch.equal(pool.get_key_buffer(0)[slots].cpu(), rows(3, 2, 6))
