"""Lesson 17. int4 rows: half a step of error at most, a step for every 32 numbers, two codes in a byte."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.quantized.int4_rows import GROUP, joined, pack, quantize4, row_bytes, unpack
from mini_engine.quantized.rotation import rotate
from tests.support import some


def restored(codes, step, least):
    """Return what codes stand for, by the definition: least + code · step, each group with its own."""
    group = torch.arange(codes.shape[-1]) // GROUP
    return codes.float() * step.float()[..., group] + least.float()[..., group]


# ---------------------------------------------------------------- quantize4


@pytest.mark.task(2)
def test_a_group_that_lies_on_its_levels_comes_back_exactly():
    levels = torch.arange(16).repeat(2)
    codes, step, least = quantize4(levels * 0.5 - 3.0)
    assert step.tolist() == [0.5], "step = (largest − least) / 15: 16 levels have 15 steps between them"
    assert least.tolist() == [-3.0], "levels begin at the group's least number"
    assert codes.tolist() == levels.tolist(), "code = (x − least) / step: here each number is a level"


@pytest.mark.task(2)
@pytest.mark.parametrize("shape", [(32,), (3, 64), (2, 4, 128)])
def test_the_shapes_of_codes_steps_and_least_numbers(shape):
    codes, step, least = quantize4(some(*shape))
    assert codes.dtype == torch.uint8 and codes.shape == shape, "a code for each number"
    assert int(codes.max()) <= 15, "16 levels have codes from 0 to 15"
    for name, got in (("step", step), ("least", least)):
        assert got.dtype == torch.float16, f"{name} is stored in float16, got {got.dtype}"
        assert got.shape == (*shape[:-1], shape[-1] // GROUP), f"a {name} for each group of {GROUP}"


@pytest.mark.task(2)
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(-22, 6), st.floats(-40, 40), st.integers(0, 2**32))
def test_a_number_gets_the_nearest_of_the_levels_that_are_stored(groups, exponent, shift, seed):
    x = (some(5, 2, GROUP * groups, seed=seed) + shift) * 2.0**exponent
    codes, step, least = quantize4(x)
    width = step.float()[..., None].repeat_interleave(GROUP, dim=-2).flatten(-2)
    levels = least.float()[..., None] + step.float()[..., None] * torch.arange(16)
    levels = levels.repeat_interleave(GROUP, dim=-2)
    off, nearest = (restored(codes, step, least) - x).abs(), (levels - x[..., None]).abs().amin(-1)
    worst = float(((off - nearest) / width.clamp_min(1e-30)).max())
    assert worst < 1e-2, (
        f"off by {worst:.2f} steps more than the nearest level; levels are least + code · step, as stored in float16"
    )
    rounding = x.abs().amax() * 1e-3 + 1e-6  # step and least have 11 bits, and none is smaller than 2^-24
    assert float((nearest - rounding - width / 2).max()) <= 0, "the levels reach from the least number to the largest"


@pytest.mark.task(2)
def test_an_outlier_costs_its_own_group_only():
    x = some(2, 96)
    calm = restored(*quantize4(x))
    x[0, 40] = 100.0
    got = restored(*quantize4(x))
    assert torch.equal(got[1], calm[1]), "another vector came out differently"
    assert torch.equal(got[0, :32], calm[0, :32]) and torch.equal(got[0, 64:], calm[0, 64:]), (
        f"an outlier in numbers 32 … 63 changed other groups; every {GROUP} numbers have a step of their own"
    )


@pytest.mark.task(2)
def test_numbers_far_from_zero_keep_their_differences():
    x = 100 + some(1, GROUP)
    off = float((restored(*quantize4(x)) - x).abs().max())
    assert off < 0.3, f"off by {off:.2f}: levels begin at the group's least number, wherever that is"


@pytest.mark.task(2)
def test_codes_fit_the_step_that_is_stored():
    """A least number that float16 rounds up would give the smallest numbers codes below 0, which wrap to 255."""
    x = 1000.4 + some(64, GROUP) * 1e-3
    codes, step, least = quantize4(x)
    assert int(codes.max()) <= 15, f"code {int(codes.max())}: clamp to 0 … 15, since float16 moves the levels a little"
    off = float((restored(codes, step, least) - x).abs().max())
    assert off <= 0.5, f"off by {off:.2f}; float16 near 1000 has steps of 0.5"


@pytest.mark.task(2)
@pytest.mark.parametrize("dim", [18, 33, 40])
def test_a_short_last_group_has_levels_for_its_own_numbers_only(dim):
    x = 7 + some(4, dim).abs()
    codes, step, least = quantize4(x)
    assert codes.shape == x.shape, "a code for each number, and none for what fills up the last group"
    assert step.shape == least.shape == (4, -(-dim // GROUP)), "the last group may be short"
    last = x[:, dim // GROUP * GROUP :]
    expected = ((last.amax(-1) - last.amin(-1)) / 15).half()
    assert torch.equal(step[:, -1], expected), "the last group is short; what fills it up must not widen its range"


@pytest.mark.task(2)
@pytest.mark.parametrize("value", [0.0, 1.5, -2.0])
def test_equal_numbers_come_back_as_they_were(value):
    x = torch.full((3, GROUP), value)
    codes, step, least = quantize4(x)
    got = restored(codes, step, least)
    assert torch.equal(got, x), "a group without a range has step 0, and nothing is divided by it"


@pytest.mark.task(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_dtype_is_rounded_in_float32(dtype):
    x = some(16, 2, 64).to(dtype)
    for got, expected in zip(quantize4(x), quantize4(x.float()), strict=True):
        assert torch.equal(got, expected), "convert x to float32 first: otherwise the division rounds, too"


# ---------------------------------------------------------------- two codes in a byte


def parts(*shape, seed=0):
    """Return codes `[..., D]`, steps and least numbers of their groups, as quantize4 returns them."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, shape, generator=generator).to(torch.uint8)
    ends = torch.rand((2, *shape[:-1], -(-shape[-1] // GROUP)), generator=generator)
    return codes, ends[0].half(), (ends[1] - 0.5).half()


@pytest.mark.task(3)
def test_bytes_of_a_row():
    codes = torch.tensor([*range(16), *reversed(range(16))], dtype=torch.uint8)
    row = joined(codes[None], torch.tensor([[0.25]]).half(), torch.tensor([[1.0]]).half())
    assert row.shape == (1, 20), f"16 bytes of codes, 2 of step, 2 of least; got shape {list(row.shape)}"
    assert row.dtype == torch.uint8
    low, high = row[0, :16] & 15, row[0, :16] >> 4
    assert low.tolist() == codes[::2].tolist(), "number 2i is in the low four bits of byte i"
    assert high.tolist() == codes[1::2].tolist(), "number 2i + 1 is in the high four bits of byte i"
    assert row[0, 16:18].view(torch.float16).tolist() == [0.25], "then the step of each group, float16"
    assert row[0, 18:20].view(torch.float16).tolist() == [1.0], "then the least number of each group, float16"


@pytest.mark.task(3)
@pytest.mark.parametrize("shape", [(0, 2, 32), (3, 1, 64), (2, 2, 128), (3, 2, 18), (2, 40), (5, 33)])
def test_a_row_holds_all_codes_and_steps(shape):
    codes, step, least = parts(*shape)
    rows = joined(codes, step, least)
    assert rows.shape == (*shape[:-1], row_bytes(shape[-1])), f"row_bytes({shape[-1]}) bytes for each vector"
    got = unpack(rows, shape[-1])
    expected = restored(codes, step, least)
    assert got.shape == shape
    off = float((got - expected).abs().max()) if got.numel() else 0.0
    assert off < 1e-6, f"off by {off:.2g}: least + code · step, each number with its own group's, from the row alone"


@pytest.mark.task(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_four_bits_come_back_in_the_dtype_of_the_queries(dtype):
    codes, step, least = parts(3, 2, 64)
    back = unpack(joined(codes, step, least), 64, dtype)
    assert back.dtype == dtype
    expected = restored(codes, step, least).to(dtype)
    assert torch.equal(back, expected), "multiply and add in float32, and convert at the end"


def test_a_row_has_five_bits_a_number():
    assert [row_bytes(dim) for dim in (32, 64, 128)] == [20, 40, 80]


def test_the_page_s_example():
    """k = (16, 1, −1, 0.5) and q = (0, 3, −2, 1): what the page says of both ways."""
    k, q = torch.tensor([16.0, 1, -1, 0.5]), torch.tensor([0.0, 3, -2, 1])
    plain, turned = (unpack(pack(x), 4) for x in (k, rotate(k)))
    assert rotate(k).tolist() == [8.25, 6.75, 8.75, 8.25]
    assert plain.tolist() == pytest.approx([16, 1.27, -1, 0.13], abs=0.01)
    assert turned.tolist() == pytest.approx([8.22, 6.75, 8.75, 8.22], abs=0.01)
    scores = [float(q @ k), float(q @ plain), float(rotate(q) @ turned)]
    assert scores == pytest.approx([5.5, 5.93, 5.47], abs=0.01)
