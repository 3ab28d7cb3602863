"""Lesson 17. Attention over rows: queries are rotated as the rows are, results are rotated back, rows never are."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from mini_engine.attention.contract import Batch
from mini_engine.attention.reference import paged_attention
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.quantized.attention import reference_attention
from mini_engine.quantized.formats import RowFormat
from mini_engine.quantized.kernels import RowKernel
from mini_engine.quantized.pool import RowKvPool
from tests.support import some

BLOCK, HEADS, KV_HEADS, DIM = 4, 4, 2, 8
TABLES = torch.tensor([[3, 1, 4], [2, 5, 0]], dtype=torch.int32)
LENGTHS = torch.tensor([10, 6], dtype=torch.int32)
STARTS = torch.tensor([0, 3, 4], dtype=torch.int32)  # three queries of the first sequence, one of the second
BATCH = Batch(STARTS, LENGTHS, TABLES)
SCALE = DIM**-0.5


def mirrored(x):
    """A rotation that is easy to see: numbers in the opposite order, its own inverse."""
    return x.flip(-1)


def four_bytes(x):
    """Vectors `[..., D]` as rows that keep every bit: with enough of them nothing is lost."""
    return x.float().contiguous().view(torch.int8)


def numbers(rows, dim, dtype=torch.float32):
    return rows.contiguous().view(torch.float32)[..., :dim].to(dtype)


def exact(rotate=mirrored):
    """A format without rounding."""
    return RowFormat("exact", torch.int8, lambda dim: 4 * dim, four_bytes, numbers, rotate)


def caches(turn=mirrored):
    """Return K and V of six blocks as vectors, and the rows of a pool that stores them rotated."""
    k, v = some(6, BLOCK, KV_HEADS, DIM, seed=1), some(6, BLOCK, KV_HEADS, DIM, seed=2)
    return (k, v), (four_bytes(turn(k)), four_bytes(turn(v)))


def kernel(rows, inner=None):
    """Return the kernel under test; `inner` takes the place of its attention, which takes rotated queries."""

    return RowKernel("exact", inner or partial(reference_attention, rows=rows), rows)


@pytest.mark.task(5)
def test_attention_over_rows_is_attention_over_what_they_stand_for():
    (k, v), _ = caches()
    plain = four_bytes(k), four_bytes(v)
    q = some(4, HEADS, DIM)
    got = reference_attention(q, *plain, BATCH, SCALE, rows=exact())
    expected = paged_attention(q, k, v, BATCH, SCALE)
    off = float((got - expected).abs().max())
    assert off < 1e-5, f"off by {off:.2g}: gather each sequence's rows, unpack them, and attend as in lesson 3"


@pytest.mark.task(5)
def test_only_the_sequences_own_rows_are_read():
    (k, v), _ = caches()
    k[4, 2:], v[4, 2:] = float("nan"), float("nan")  # behind token 10 of the first sequence
    q = some(4, HEADS, DIM)
    got = reference_attention(q, four_bytes(k), four_bytes(v), BATCH, SCALE, rows=exact())
    assert got.isfinite().all(), "a row past the text's end was read; seq_lens_kv counts the sequence's own tokens"


@pytest.mark.task(5)
def test_a_sequence_without_queries_is_left_out():
    (k, v), _ = caches()
    batch, q, read = BATCH._replace(cu_seqlens_q=torch.tensor([0, 0, 1], dtype=torch.int32)), some(1, HEADS, DIM), []
    rows = replace(exact(), unpack=lambda rows, *rest: read.append(rows.numel()) or numbers(rows, *rest))
    got = reference_attention(q, four_bytes(k), four_bytes(v), batch, SCALE, rows=rows)
    expected = paged_attention(q, k, v, batch, SCALE)
    assert got.shape == (1, HEADS, DIM) and float((got - expected).abs().max()) < 1e-5
    most = 2 * 2 * BLOCK * KV_HEADS * 4 * DIM  # K and V of the second sequence's two blocks, in bytes
    assert sum(read) <= most, "the first sequence has no query in this step: do not read its rows"


@pytest.mark.task(5)
def test_what_is_attended_to_has_the_dtype_of_the_queries():
    (k, v), _ = caches()
    q, heard = some(4, HEADS, DIM).bfloat16(), []

    def attend(q, k, v, scale):
        heard.append((k.dtype, v.dtype))
        return torch.zeros_like(q)

    rows = four_bytes(k), four_bytes(v)
    got = reference_attention(q, *rows, BATCH, SCALE, rows=exact(), attend=attend)
    assert heard == [(torch.bfloat16, torch.bfloat16)] * 2, "unpack rows to the dtype of q, once for each sequence"
    assert got.dtype == torch.bfloat16


@pytest.mark.task(5)
def test_rotated_keys_meet_rotated_queries():
    _, rows = caches()
    q, heard = some(4, HEADS, DIM), []

    def inner(q, *rest):
        heard.append(q.clone())
        return torch.zeros_like(q)

    kernel(exact(), inner)(q, *rows, BATCH, SCALE)
    assert len(heard) == 1, "one call of paged_attention for the whole batch"
    same = torch.equal(heard[0], mirrored(q))
    assert same, "the query must be rotated before it meets rows of rotated keys: (Hq) · (Hk) = q · k"


@pytest.mark.task(5)
def test_the_result_is_rotated_back():
    _, rows = caches()
    q, sums = some(4, HEADS, DIM), some(4, HEADS, DIM, seed=5)
    got = kernel(exact(), lambda *_: sums)(q, *rows, BATCH, SCALE)
    same = torch.equal(got, mirrored(sums))
    assert same, "a weighted sum of rotated values is rotated: rotate it back, Σ p (Hv) = H (Σ p v)"


@pytest.mark.task(5)
def test_nothing_but_queries_and_results_is_rotated():
    turned = []

    def watched(x):
        turned.append(tuple(x.shape))
        return mirrored(x)

    _, rows = caches()
    q = some(4, HEADS, DIM)
    kernel(exact(watched))(q, *rows, BATCH, SCALE)
    expected = [(4, HEADS, DIM)] * 2
    assert turned == expected, "q before and the result after; rows are read as they are, whatever the history's length"


@pytest.mark.task(5)
def test_with_enough_bits_attention_is_that_of_full_precision():
    (k, v), rows = caches()
    q = some(4, HEADS, DIM)
    got = kernel(exact())(q, *rows, BATCH, SCALE)
    off = float((got - paged_attention(q, k, v, BATCH, SCALE)).abs().max())
    assert off < 1e-5, f"off by {off:.2g}, though nothing was rounded: is everything rotated once, and back once?"


@pytest.mark.task(5)
def test_caches_that_do_not_fit_are_refused():
    _, (k, v) = caches()
    with pytest.raises(ValueError, match=r"row|int8"):
        kernel(exact())(some(4, HEADS, DIM + 1), k, v, BATCH, SCALE)
    with pytest.raises(ValueError, match=r"block_table|contiguous|seq"):
        kernel(exact())(some(4, HEADS, DIM), k, v, BATCH._replace(block_table=BATCH.block_table[:1]), SCALE)


def test_a_pool_stores_rotated_rows():
    config = Qwen3Config(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
    )
    pool = RowKvPool(exact(), config, 3, BLOCK, kernel(exact()))
    k, v = some(2, KV_HEADS, DIM, seed=3), some(2, KV_HEADS, DIM, seed=4)
    pool.set_kv(0, torch.tensor([5, 9]), k, v)
    for cache, x in ((pool.K, k), (pool.V, v)):
        got = numbers(cache[0].flatten(0, 1)[[5, 9]], DIM)
        assert torch.equal(got, mirrored(x)), "keys and values are rotated first, then packed"
