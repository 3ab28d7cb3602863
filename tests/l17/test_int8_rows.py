"""Lesson 17. int8 rows: half a step of error at most, a scale for each token and head, and rows that keep theirs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.attention.registry import load_kernel
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.quantized.formats import INT8
from mini_engine.quantized.pool import RowKvPool, bytes_per_token
from mini_engine.quantized.rows import pack, quantize, row_bytes, unpack
from tests.support import some

CONFIG = Qwen3Config(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=18,
)


def make_pool(num_blocks=5, block_size=4):
    return RowKvPool(INT8, CONFIG, num_blocks, block_size, load_kernel("reference", rows="int8"))


# ---------------------------------------------------------------- quantize


@pytest.mark.task(1)
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.floats(-30, 30), st.integers(0, 2**32))
def test_a_number_is_off_by_half_a_step_at_most(dim, exponent, seed):
    x = some(5, 3, dim, seed=seed) * 2.0**exponent
    codes, scale = quantize(x)
    assert codes.dtype == torch.int8, "the stored numbers are torch.int8"
    assert codes.shape == x.shape and scale.dtype == torch.float32
    assert scale.shape == x.shape[:-1], "one scale for each token and head"
    largest = x.abs().amax(-1)
    assert torch.allclose(scale * 127, largest, rtol=1e-5, atol=0.0), "a vector's scale is its largest |x| / 127"
    steps = ((codes * scale[..., None] - x).abs() / scale[..., None].clamp_min(1e-30)).max()
    assert steps <= 0.5001, f"off by {steps:.1f} steps of the scale; the nearest multiple is off by 0.5 at most"
    assert (codes.abs().amax(-1) == 127).all(), "the largest number of each vector takes the whole range"


@pytest.mark.task(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_dtype_is_divided_in_float32(dtype):
    x = some(5, 3, 64).to(dtype)
    codes, scale = quantize(x)
    assert scale.dtype == torch.float32, "the scale is float32, whatever x is"
    steps = ((codes * scale[..., None] - x.float()).abs() / scale[..., None]).max()
    assert steps <= 0.5001, f"off by {steps:.2f} steps of the scale: convert x to float32 before dividing"


@pytest.mark.task(1)
def test_a_large_vector_does_not_disturb_the_others():
    x = some(4, 2, 64)
    calm = unpack(pack(x), 64)
    x[1, 0] *= 1000
    changed = unpack(pack(x), 64)
    others = [(token, head) for token in range(4) for head in range(2) if (token, head) != (1, 0)]
    for token, head in others:
        same = torch.equal(changed[token, head], calm[token, head])
        assert same, f"token 1 of head 0 is 1000 times larger, and token {token} of head {head} came out differently"


@pytest.mark.task(1)
def test_x_and_minus_x_have_the_same_size():
    x = some(3, 2, 32)
    assert torch.equal(unpack(pack(-x), 32), -unpack(pack(x), 32))


@pytest.mark.task(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_stay_zeros(dtype):
    codes, scale = quantize(torch.zeros(3, 2, 8, dtype=dtype))
    assert not codes.any() and not scale.any(), "a vector of zeros has scale 0, and nothing is divided by it"
    assert not unpack(pack(torch.zeros(3, 2, 8)), 8).any()


@pytest.mark.task(1)
@pytest.mark.parametrize("size", [1e-44, 2e-43, 1e-38, 1e30])
def test_the_smallest_and_largest_vectors_stay_finite(size):
    x = torch.tensor([[size, -size, size / 2, 0.0]])
    error = float((unpack(pack(x), 4) - x).abs().max())
    least = torch.finfo(torch.float32).tiny  # below it float32 itself has few digits left
    assert error <= max(size / 100, least), f"numbers of size {size} came back off by {error}"


@pytest.mark.task(1)
@pytest.mark.parametrize("fault", [float("nan"), float("inf"), -float("inf")])
def test_a_fault_in_k_or_v_stays_visible(fault):
    x = some(2, 2, 8)
    x[1, 0, 3] = fault
    back = unpack(pack(x), 8)
    assert not back[1, 0].isfinite().all(), f"{fault} became an ordinary number, which would hide a model's overflow"
    assert back[0].isfinite().all() and back[1, 1].isfinite().all(), "other vectors are not affected"


@pytest.mark.parametrize("shape", [(0, 2, 8), (3, 1, 1), (2, 2, 18), (1, 4, 128)])
def test_rows_hold_the_numbers_and_behind_them_the_scale(shape):
    x = some(*shape)
    codes, scale = quantize(x)
    rows = pack(x)
    assert rows.dtype == torch.int8 and rows.shape == (*shape[:-1], row_bytes(shape[-1]))
    assert torch.equal(rows[..., : shape[-1]], codes)
    assert torch.equal(rows[..., -4:].contiguous().view(torch.float32)[..., 0], scale), "the last 4 bytes are the scale"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_back_in_the_dtype_of_the_queries(dtype):
    x = some(3, 2, 16).to(dtype)
    back = unpack(pack(x), 16, dtype)
    assert back.dtype == dtype and (back - x).abs().max() < 0.02 * x.abs().max()


# ---------------------------------------------------------------- the pool


def test_a_token_takes_its_integers_and_a_scale_in_each_head():
    assert row_bytes(128) == 132 and row_bytes(64) == 68 and row_bytes(18) == 24, "scales lie at multiples of 4 bytes"
    pool = make_pool()
    assert bytes_per_token(CONFIG, INT8) == 2 * 2 * 2 * 24
    assert pool.bytes == 5 * 4 * bytes_per_token(CONFIG, INT8), "what the engine counts is what the pool takes"


@pytest.mark.parametrize("shape", [(3, 2, 17), (3, 2, 24), (2, 2, 18), (3, 1, 18)])
def test_wrong_shapes_are_refused_and_nothing_is_written(shape):
    pool, slots, good = make_pool(), torch.tensor([4, 5, 6]), some(3, 2, 18)
    pool.set_kv(0, slots, good, good)
    before = pool.K[0].clone()
    for k, v in ((some(*shape), good), (good, some(*shape))):
        with pytest.raises(ValueError, match=str(shape[-1])):
            pool.set_kv(0, slots, k, v)
    with pytest.raises(ValueError, match="20"):
        pool.set_kv(0, torch.tensor([4, 5, 20]), -good, good)
    assert torch.equal(pool.K[0], before)
