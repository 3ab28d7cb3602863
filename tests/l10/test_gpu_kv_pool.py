"""Lesson 10. The pool with a padding page; keys and values may differ in shape."""

import pytest
import torch

from mini_engine.attention.registry import load_kernel
from mini_engine.errors import UserError
from mini_engine.gpu.kv_pool import KvPool
from mini_engine.gpu.req_to_token import ReqToTokenPool
from mini_engine.gpu.slot_allocator import TokenToKVPoolAllocator
from tests.support import both, oracle, refused


def rows(count, heads, dim, seed=0):
    return torch.randn(count, heads, dim, generator=torch.Generator().manual_seed(seed))


def cleared(pool):
    """Return the pool filled with zeros: a new pool holds whatever was in memory before."""
    for tensor in (*pool.K, *pool.V):
        tensor.zero_()
    return pool


def contents(pool):
    return torch.cat([x.flatten() for x in (*pool.K, *pool.V)])


def is_refused(pool, match, call):
    before = contents(pool).clone()
    with pytest.raises(ValueError, match=match):
        call()
    assert torch.equal(contents(pool), before), "a rejected call must write nothing"


@pytest.mark.parametrize("page", [1, 4])
def test_the_padding_page_comes_on_top_of_the_size(page):
    pool = KvPool(8, 2, (2, 3), page_size=page)
    assert pool.K[0].shape == pool.V[1].shape == (8 // page + 1, page, 2, 3), "size counts slots for tokens only"
    assert pool.size == 8 and len(pool.K) == len(pool.V) == 2
    assert pool.bytes == 2 * 2 * (8 + page) * 2 * 3 * 4


@pytest.mark.parametrize(("size", "page"), [(10, 4), (0, 1), (8, 0)])
def test_a_size_that_is_not_whole_pages_is_refused(size, page):
    with refused(UserError, f"{size} {page}"):
        KvPool(size, 1, (1, 2), page_size=page)


def test_a_pool_for_a_model_has_its_layers_and_heads():
    config = both("two, tied, wide heads")[0].config
    pool = KvPool.for_model(config, 8, page_size=4, dtype=torch.bfloat16)
    assert len(pool.K) == config.num_hidden_layers and pool.K[0].dtype == pool.V[0].dtype == torch.bfloat16
    assert pool.k_shape == pool.v_shape == (config.num_key_value_heads, config.head_dim)


def test_edge_case_17_keys_and_values_may_differ_in_heads_and_dimensions():
    pool = cleared(KvPool(8, 2, (2, 6), (1, 4)))
    slots = torch.tensor([5, 1, 8], dtype=torch.int32)
    k, v = rows(3, 2, 6), rows(3, 1, 4, seed=1)
    pool.set_kv(1, slots, k, v)
    got_k, got_v = pool.gather(1, slots)
    assert torch.equal(got_k, k) and torch.equal(got_v, v), "each comes back as it went in"
    assert not pool.K[0].any() and not pool.V[0].any(), "the other layer is untouched"
    others = [0, 2, 3, 4, 6, 7]
    assert not pool.K[1].flatten(0, 1)[others].any(), "only the named slots are written"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(6, 2, 3), (2, 3, 2, 3), (6, 6), (2, 3, 6)])
def test_rows_may_come_in_any_leading_shape(shape, dtype):
    pool = KvPool(8, 1, (2, 3))
    k = rows(6, 2, 3)
    slots = torch.tensor([6, 2, 1, 4, 5, 8], dtype=dtype)
    slots = slots.view(2, 3) if shape[0] == 2 else slots
    pool.set_kv(0, slots, k.view(shape), -k.view(shape))
    got_k, got_v = pool.gather(0, slots.flatten())
    assert torch.equal(got_k, k) and torch.equal(got_v, -k)


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
    pool = cleared(KvPool(8, 1, (2, 3)))
    is_refused(pool, "one row per slot", lambda: pool.set_kv(0, torch.tensor([1, 2, 3]), k, v))


@pytest.mark.parametrize("stray", [-1, 9, 100])
def test_a_slot_outside_the_pool_is_refused_and_minus_1_does_not_wrap(stray):
    pool = cleared(KvPool(8, 1, (2, 3)))
    is_refused(
        pool, "not all in 0 … 8", lambda: pool.set_kv(0, torch.tensor([1, stray]), rows(2, 2, 3), rows(2, 2, 3, seed=1))
    )


def test_many_rows_may_go_into_the_padding_slot():
    pool = cleared(KvPool(8, 1, (2, 3)))
    pool.set_kv(0, torch.tensor([3, 0, 0, 0]), rows(4, 2, 3), rows(4, 2, 3))
    assert torch.equal(pool.K[0].flatten(0, 1)[3], rows(4, 2, 3)[0])
    assert not pool.K[0].flatten(0, 1)[[1, 2, 4, 5, 6, 7, 8]].any()


def test_pages_are_copied_as_blocks_are():
    pool = KvPool(8, 1, (1, 2), (1, 3), page_size=4)
    slots = torch.arange(4, 12)
    pool.set_kv(0, slots, rows(8, 1, 2), rows(8, 1, 3))
    page = pool.K[0][1].clone(), pool.V[0][1].clone()
    pool.copy_blocks([1], [2])
    assert torch.equal(pool.K[0][2], page[0]) and torch.equal(pool.V[0][2], page[1])


# Attention


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("kernel", ["reference", "torch"])
def test_attention_reads_the_slots_that_the_table_names(kernel, page):
    """Everything else in the pool is NaN, the padding page included."""
    lengths, size = [5, 1, 8], 32
    pool = KvPool(size, 1, (2, 16), page_size=page, kernel=load_kernel(kernel))
    allocator, table = TokenToKVPoolAllocator(size, page), ReqToTokenPool(4, 8)
    for tensor in (*pool.K, *pool.V):
        tensor.fill_(float("nan"))
    allocator.alloc(2 * page)  # another request's
    held, keys, values = table.alloc(3), [], []
    for row, length in zip(held, lengths, strict=True):
        slots = allocator.alloc(-(-length // page) * page)
        table.write(row, 0, slots)
        keys.append(rows(length, 2, 16, seed=row))
        values.append(rows(length, 2, 16, seed=row + 9))
        pool.set_kv(0, slots[:length], keys[-1], values[-1])
    q = rows(4, 4, 16, seed=7)
    lens = torch.tensor([*lengths, 0], dtype=torch.int32)
    meta = table.plan_decode(torch.tensor([*held, 0]), lens, page)
    out = pool.attend(0, q, meta)
    for s in range(3):
        want = oracle(q[s : s + 1], keys[s], values[s]).float()
        torch.testing.assert_close(out[s : s + 1], want, msg=lambda text, s=s: f"sequence {s}: {text}")
    assert not out[3].any(), "a padding row's output is zeros"


def test_attention_over_different_shapes_is_refused_and_says_why():
    pool = KvPool(8, 1, (2, 6), (1, 4), kernel=load_kernel("reference"))
    with pytest.raises(ValueError):
        pool.attend(0, rows(1, 2, 6), None)


def test_attention_without_a_kernel_is_refused():
    with pytest.raises(ValueError):
        KvPool(8, 1, (2, 6)).attend(0, rows(1, 2, 6), None)


@pytest.mark.gpu
def test_the_pool_lives_on_the_gpu():
    pool = KvPool(8, 1, (2, 6), (1, 4), device="cuda")
    slots = torch.tensor([5, 1, 8], dtype=torch.int32, device="cuda")
    pool.set_kv(0, slots, rows(3, 2, 6).cuda(), rows(3, 1, 4).cuda())
    assert torch.equal(pool.gather(0, slots)[0].cpu(), rows(3, 2, 6))
