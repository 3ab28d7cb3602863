"""Lesson 10. The factories: pool, allocator and table fit each other, and the buffers show what was written."""

import pytest
import torch

from mini_engine.errors import UserError
from mini_engine.gpu.loop import DeviceKv
from mini_engine.gpu.pools import make_full_attention_net_mem_pool, make_req_to_token_pool
from tests.support import refused


@pytest.mark.parametrize("page", [1, 4])
def test_every_slot_that_is_handed_out_lies_in_the_pool_behind_the_padding(page):
    pool, allocator = make_full_attention_net_mem_pool(8, 2, 2, 3, page_size=page, dtype=torch.bfloat16)
    assert len(pool.K) == len(pool.V) == 2 and pool.page_size == allocator.page_size == page
    slots = allocator.alloc(8)
    assert sorted(slots.tolist()) == list(range(page, page + 8)), "slot 0 and its page are the padding"
    keys, values = pool.get_kv_buffer(1)
    assert keys.shape == values.shape == (8 + page, 2, 3) and keys.dtype == torch.bfloat16
    assert slots.max() < len(keys), "the last slot must lie inside the buffer"


def test_values_have_the_keys_heads_and_dimension_unless_they_are_given():
    def shapes(*v):
        pool, _ = make_full_attention_net_mem_pool(4, 1, 2, 6, *v)
        return tuple(pool.get_key_buffer(0).shape[1:]), tuple(pool.get_value_buffer(0).shape[1:])

    assert shapes() == ((2, 6), (2, 6))
    assert shapes(1, 4) == ((2, 6), (1, 4))
    assert shapes(1) == ((2, 6), (1, 6)) and shapes(None, 4) == ((2, 6), (2, 4))


def test_the_buffers_are_views_by_slot_of_what_kernels_read_by_page():
    pool, _ = make_full_attention_net_mem_pool(8, 2, 1, 2, 1, 3, page_size=4)
    k, v = torch.arange(4.0).view(2, 1, 2), torch.arange(6.0).view(2, 1, 3)
    pool.set_kv_buffer(1, torch.tensor([5, 8], dtype=torch.int32), k, v)
    assert torch.equal(pool.K[1][1, 1], k[0]) and torch.equal(pool.V[1][2, 0], v[1]), "slot 5 is page 1, offset 1"
    assert torch.equal(pool.get_key_buffer(1)[[5, 8]], k) and torch.equal(pool.get_value_buffer(1)[[5, 8]], v)
    pool.get_kv_buffer(0)[0][4] = 7
    assert pool.K[0][1, 0].eq(7).all(), "a buffer is a view, so writing to it writes to the pool"


def test_a_model_s_layers_write_where_the_buffer_says():
    """`set_kv` is the name that lesson 0's layers call."""
    by_buffer, by_layer = (make_full_attention_net_mem_pool(4, 1, 1, 2)[0] for _ in range(2))
    call = (0, torch.tensor([3, 1]), torch.ones(2, 1, 2), torch.full((2, 1, 2), 2.0))
    for pool in (by_buffer, by_layer):
        for tensor in pool.get_kv_buffer(0):
            tensor.zero_()
    by_buffer.set_kv_buffer(*call)
    by_layer.set_kv(*call)
    assert torch.equal(by_buffer.K[0], by_layer.K[0]) and torch.equal(by_buffer.V[0], by_layer.V[0])
    assert by_layer.V[0].flatten(0, 1)[:, 0, 0].tolist() == [0, 2, 0, 2, 0]


@pytest.mark.parametrize(("length", "width"), [(1, 4), (4, 4), (5, 8)])
def test_a_row_holds_whole_pages_so_the_longest_request_fits(length, width):
    table = make_req_to_token_pool(3, length, page_size=4)
    assert table.max_context_len == width and table.max_reqs == 3
    pool, allocator = make_full_attention_net_mem_pool(8, 1, 1, 2, page_size=4)
    kv = DeviceKv(table, allocator, pool)
    row = kv.take(length)
    assert table.read(row, length).tolist() == list(range(4, 4 + length))
    kv.give_back(row, length)
    assert allocator.available_size() == 8 and table.available_size() == 3


def test_sorting_is_the_allocator_s_choice():
    first = []
    for need_sort in (True, False):
        _, allocator = make_full_attention_net_mem_pool(4, 1, 1, 2, need_sort=need_sort)
        slots = allocator.alloc(4)
        allocator.free(slots[2:])
        allocator.free(slots[:2])
        first.append(allocator.alloc(4).tolist())
    assert first == [[1, 2, 3, 4], [3, 4, 1, 2]]


@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        (lambda: make_full_attention_net_mem_pool(10, 1, 1, 2, page_size=4), "10 4"),
        (lambda: make_req_to_token_pool(3, 5, page_size=0), "0"),
        (lambda: make_req_to_token_pool(0, 5), "0 5"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make, numbers):
    with refused(UserError, numbers):
        make()
