"""Lesson 17. Rotation: scores stay, an outlier spreads, a second rotation brings everything back, in any width."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.quantized.formats import FORMATS, INT4, INT8
from mini_engine.quantized.rotation import block_of, hadamard, rotate
from tests.support import must_raise, some

WIDTHS = [1, 2, 4, 16, 64, 128, 256]


# ---------------------------------------------------------------- the matrix


@pytest.mark.task(4)
def test_a_matrix_of_four():
    expected = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    got = hadamard(4)
    assert got.shape == (4, 4), f"[n, n], got shape {list(got.shape)}"
    assert (got * 2).tolist() == (expected * 2).tolist(), (
        "H2n = [[Hn, Hn], [Hn, −Hn]], and all of it divided by √n once"
    )


@pytest.mark.task(4)
@pytest.mark.parametrize("n", WIDTHS)
def test_rows_are_orthogonal_and_of_length_1(n):
    h = hadamard(n)
    off = float((h @ h.T - torch.eye(n)).abs().max())
    assert off < 1e-5, f"H · Hᵀ is off the identity by {off:.3g}: a rotation changes no length and no score"
    assert float((h.abs() - n**-0.5).abs().max()) < 1e-6, "every entry is 1 / √n or −1 / √n"
    assert torch.equal(h, h.T), "this construction is symmetric, so that H undoes itself"


@pytest.mark.task(4)
@pytest.mark.parametrize("n", [6, 3, 12, 0])
def test_there_is_no_such_matrix_of_another_size(n):
    with must_raise(
        ValueError, f"{n} is no power of two: doubling never ends there, and a larger matrix is another one"
    ):
        hadamard(n)


# ---------------------------------------------------------------- rotating vectors


@pytest.mark.task(4)
def test_scores_stay():
    q, k = some(5, 4, 128), some(7, 4, 128, seed=1)
    expected = torch.einsum("qhd,khd->hqk", q, k)
    got = torch.einsum("qhd,khd->hqk", rotate(q), rotate(k))
    off = float((got - expected).abs().max())
    assert off < 1e-3, f"a score changed by {off:.3g}; with an orthonormal H, (Hq) · (Hk) = q · k"


@pytest.mark.task(4)
def test_an_outlier_is_spread_over_all_numbers():
    x = torch.zeros(64)
    x[5] = 16.0
    got = rotate(x).abs()
    assert float(got.max()) == pytest.approx(2.0), "one number of 16 becomes 64 of 16 / √64 = 2"
    assert float(got.min()) == pytest.approx(2.0), "every number gets the same part of it"


@pytest.mark.task(4)
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 160), st.integers(0, 2**32))
def test_a_second_rotation_undoes_the_first(dim, seed):
    x = some(2, 3, dim, seed=seed)
    once = rotate(x)
    assert once.shape == x.shape
    off = float((rotate(once) - x).abs().max())
    assert off < 1e-5, f"for D = {dim} it is off by {off:.3g}: H is its own inverse, in every width"
    assert torch.allclose(once.norm(dim=-1), x.norm(dim=-1), rtol=1e-4), "a rotation changes no length"


@pytest.mark.task(4)
def test_a_width_that_is_no_power_of_two_is_rotated_in_runs():
    x = torch.zeros(96)
    x[40] = 8.0
    got = rotate(x)
    assert got[:32].abs().max() == 0 and got[64:].abs().max() == 0, "96 is 3 · 32: each run of 32 is rotated by itself"
    assert torch.allclose(got[32:64].abs(), torch.full((32,), 8 / 32**0.5)), "within its run the outlier is spread"


@pytest.mark.task(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [32, 96, 128])
def test_vectors_are_rotated_in_float32_and_rounded_once(dtype, dim):
    """1 / √32 is no number of the narrow dtypes: rotated in its own, a vector would become longer or shorter."""
    x = some(50, dim).to(dtype)
    got = rotate(x)
    assert got.dtype == dtype, f"rotated numbers come back as {got.dtype}, and attention goes on in {dtype}"
    same = torch.equal(got, rotate(x.float()).to(dtype))
    assert same, f"rotate in float32 and round the result once: 1 / √{block_of(dim)} is no number of {dtype}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", FORMATS.values(), ids=FORMATS.keys())
def test_a_row_is_rounded_once_whatever_its_vector_s_dtype(rows, dtype):
    """A rotated vector has more digits than the vector had: rounding it to its dtype first would lose them."""
    x = some(50, 96).to(dtype)
    assert torch.equal(rows.write(x), rows.write(x.float()))


def test_int4_rows_are_of_rotated_vectors_and_int8_rows_are_not():
    """Four bits have no levels to spare for one large channel; the product with a rotated query stays what it was."""
    x = some(50, 96)
    assert torch.equal(INT8.write(x), INT8.pack(x)) and torch.equal(INT4.write(x), INT4.pack(rotate(x)))
    for rows, near in ((INT8, 0.03), (INT4, 0.6)):
        assert (rows.read(rows.write(x), 96, torch.float32) - x).abs().max() < near, "read rotates back"
