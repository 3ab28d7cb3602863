"""Lesson 10. The pool by slot: a padding page, keys and values that differ in shape, and what the model reads of it."""

import pytest
import torch

from lessons.l10_device.pools import make_full_attention_net_mem_pool


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


def test_the_buffers_are_views_by_slot_of_what_kernels_read_by_page():
    pool = pool_of(1, 2, 1, 3, layers=2, page_size=4)
    k, v = torch.arange(4.0).view(2, 1, 2), torch.arange(6.0).view(2, 1, 3)
    pool.set_kv_buffer(1, torch.tensor([5, 8], dtype=torch.int32), k, v)
    assert torch.equal(pool.blocks.K[1][1, 1], k[0]), "slot 5 is page 1, offset 1"
    assert torch.equal(pool.blocks.V[1][2, 0], v[1]), "slot 8 is page 2, offset 0"
    pool.get_kv_buffer(0)[0][4] = 7
    assert pool.blocks.K[0][1, 0].eq(7).all(), "a buffer is a view, so writing to it writes to the pool"


@pytest.mark.gpu
def test_the_pool_lives_on_the_gpu():
    pool = pool_of(2, 6, 1, 4, device="cuda")
    slots = torch.tensor([5, 1, 8], dtype=torch.int32, device="cuda")
    pool.set_kv_buffer(0, slots, rows(3, 2, 6).cuda(), rows(3, 1, 4).cuda())
    assert torch.equal(pool.get_key_buffer(0)[slots].cpu(), rows(3, 2, 6))
