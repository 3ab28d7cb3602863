"""Lesson 10. The factories: pool, allocator and table fit each other."""

import pytest
import torch

from lessons.l10_device.loop import DeviceKv
from lessons.l10_device.pools import make_full_attention_net_mem_pool, make_req_to_token_pool
from mini_engine.base.errors import UserError
from tests.support import refused


@pytest.mark.parametrize(("size", "page"), [(8, 1), (8, 4), (16, 16), (12, 3)])
def test_edge_case_7_the_highest_slot_lies_inside_the_buffer(size, page):
    pool, allocator = make_full_attention_net_mem_pool(size, 1, 1, 2, page_size=page)
    slots = allocator.alloc(size)
    assert sorted(slots.tolist()) == list(range(page, page + size)), "the whole first page must be padding"
    pool.set_kv_buffer(0, slots, torch.ones(size, 1, 2), torch.ones(size, 1, 2))
    assert pool.blocks.K[0][1:].eq(1).all() and pool.blocks.K[0][0].eq(0).all(), (
        "every slot must be written, and the padding page must not"
    )


def test_a_pool_has_the_layers_the_dtype_and_the_shapes_that_were_asked_for():
    def shapes(*v):
        pool, _ = make_full_attention_net_mem_pool(4, 3, 2, 6, *v, dtype=torch.bfloat16)
        assert len(pool.blocks.K) == len(pool.blocks.V) == 3 and pool.blocks.K[0].dtype == torch.bfloat16
        return tuple(pool.get_key_buffer(0).shape[1:]), tuple(pool.get_value_buffer(0).shape[1:])

    assert shapes() == ((2, 6), (2, 6)), "values have the keys' heads and dimension unless they are given"
    assert shapes(1, 4) == ((2, 6), (1, 4))
    assert shapes(1) == ((2, 6), (1, 6)) and shapes(None, 4) == ((2, 6), (2, 4))


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


@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        (lambda: make_full_attention_net_mem_pool(10, 1, 1, 2, page_size=4), "10 4"),
        (lambda: make_full_attention_net_mem_pool(8, 1, 2**30, 2**30), "9"),
        (lambda: make_req_to_token_pool(3, 5, page_size=0), "0"),
        (lambda: make_req_to_token_pool(0, 5), "0 5"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make, numbers):
    with refused(UserError, numbers):
        make()
