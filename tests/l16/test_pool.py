"""Lesson 16. A pool whose K and V differ in shape, and copies of its blocks."""

import pytest
import torch

from mini_engine.kv.block_tensor import KvPool
from mini_engine.tiers.blocks import BlockBytes
from tests.l16.models import model
from tests.support import must_raise

pytestmark = pytest.mark.reference
NUM_BLOCKS, SIZE, RANK, ROPE = 5, 4, 24, 8  # RANK and ROPE as in models.BASE


def make():
    """Return a pool of zeros."""
    kernel = lambda *_: None  # noqa: E731
    pool = KvPool(model().config, NUM_BLOCKS, SIZE, kernel)
    for tensor in (*pool.K, *pool.V):
        tensor.zero_()
    return pool


def random(count, seed=0):
    """Return `count` latents and rotary keys."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, 1, dim, generator=generator) for dim in (RANK, ROPE))


def filled():
    """Return a pool whose slots, but those of the null block, all differ."""
    pool = make()
    for layer in range(3):
        c, r = random(SIZE * (NUM_BLOCKS - 1), seed=layer)
        pool.set_kv(layer, torch.arange(SIZE, SIZE * NUM_BLOCKS), c, r)
    return pool


def content(pool):
    return [tensor.clone() for tensor in (*pool.K, *pool.V)]


def test_the_shapes_are_those_of_a_latent_and_a_rotary_key():
    pool = make()
    assert [tuple(layer.shape) for layer in pool.K] == [(NUM_BLOCKS, SIZE, 1, RANK)] * 3
    assert [tuple(layer.shape) for layer in pool.V] == [(NUM_BLOCKS, SIZE, 1, ROPE)] * 3
    assert pool.bytes == NUM_BLOCKS * SIZE * model().config.kv_bytes_per_token(torch.float32)


def test_what_is_written_is_in_its_slots_and_nowhere_else():
    pool, slots = make(), torch.tensor([9, 4, 18])
    c, r = random(3)
    pool.set_kv(1, slots, c, r)
    for layers, written in ((pool.K, c), (pool.V, r)):
        flat = layers[1].flatten(0, 1)
        assert torch.equal(flat[slots], written)
        flat[slots] = 0
        assert not any(layer.any() for layer in layers)


@pytest.mark.parametrize(
    ("c", "r"),
    [
        ((2, 1, ROPE), (2, 1, RANK)),  # the two exchanged
        ((2, 1, RANK), (2, 1, RANK)),
        ((2, 1, ROPE), (2, 1, ROPE)),
        ((3, 1, RANK), (2, 1, ROPE)),
        ((2, 1, RANK), (3, 1, ROPE)),
        ((2, RANK), (2, ROPE)),
        ((2, 4, RANK), (2, 4, ROPE)),
        ((2, 1, RANK), (1, 1, ROPE)),  # which torch would repeat
    ],
    ids=str,
)
def test_either_of_another_shape_is_refused_and_nothing_is_written(c, r):
    pool = filled()
    before = content(pool)
    with must_raise(ValueError, "latents and rotary keys have a shape of their own each") as caught:
        pool.set_kv(0, torch.tensor([5, 6]), torch.ones(c), torch.ones(r))
    assert f"{(2, 1, RANK)} and {(2, 1, ROPE)}" in str(caught.value), "it says what both must be"
    assert all(map(torch.equal, content(pool), before))


def test_copied_blocks_have_both():
    pool = filled()
    before = content(pool)
    pool.copy_blocks([1, 2, 1], [2, 1, 4])
    for now, old in zip(content(pool), before, strict=True):
        assert torch.equal(now[[2, 1, 4, 3]], old[[1, 2, 1, 3]]) and not torch.equal(now[1], now[2])


def test_blocks_go_to_bytes_and_back():
    pool, empty = filled(), make()
    source, target = BlockBytes(*pool.parts), BlockBytes(*empty.parts)
    assert source.payload_bytes * NUM_BLOCKS == pool.bytes
    payloads = source.read([3, 1])
    assert [len(payload) for payload in payloads] == [source.payload_bytes] * 2
    target.write([2, 4], payloads)
    for now, old in zip(content(empty), content(pool), strict=True):
        assert torch.equal(now[[2, 4]], old[[3, 1]]) and not now[[0, 1, 3]].any()
    with must_raise(ValueError, "a payload has one size"):
        target.write([1], [bytes(source.payload_bytes - 1)])
