"""Lesson 9. A packed linear layer in C++: its results, and rows that do not affect each other."""

import functools
from dataclasses import replace

import pytest
import torch

from mini_engine.base.errors import UserError
from mini_engine.base.native_build import find_compiler
from mini_engine.layers import native
from mini_engine.layers.packed_layers import PackedLinear
from mini_engine.layers.packed_step import alloc_padded
from tests.l9.test_pack import DTYPES, SHAPES

QWEN_INPUTS = [1024, 2048, 3072]  # of Qwen3-0.6B's matrices
INSTRUCTIONS = {  # compiler flags for the same source
    "plain": (),
    "AVX2": ("-march=x86-64-v3",),
    "AVX-512 without bfloat16": ("-march=native", "-mno-avx512bf16"),
    "one thread": ("-march=native", "-fno-openmp"),
}


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    try:
        find_compiler()
    except UserError as why:
        pytest.skip(f"NOT CHECKED: packed weights in C++; {why}")


@functools.cache
def functions(dtype):
    return native.Functions(dtype)


def make(outputs, inputs, dtype, seed=0, bias=False):
    """Return a weight, its bias, and its packed layer."""
    torch.manual_seed(seed)
    weight = torch.randn(outputs, inputs).to(dtype)
    extra = torch.randn(outputs).to(dtype) if bias else None
    return weight, extra, PackedLinear(functions(dtype), weight.clone(), extra)


def relative_error(got, x, weight, bias=None):
    want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    return float((got.double() - want).abs().max() / want.abs().max())


def rounding(dtype):
    return 1e-5 if dtype == torch.float32 else 5e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs, inputs", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_results_are_the_product(outputs, inputs, dtype, bias):
    weight, extra, layer = make(outputs, inputs, dtype, bias=bias)
    for rows in (0, 1, 2, 5, 12, 13, 30, 64, 100, 203):  # 203: the threads divide the rows
        x = torch.randn(rows, inputs).to(dtype)
        got = layer(x)
        assert got.shape == (rows, outputs) and got.dtype == dtype
        if rows:
            assert relative_error(got, x, weight, extra) < rounding(dtype), f"wrong with {rows} rows"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [5, 50, 77, *QWEN_INPUTS])
def test_a_row_gives_the_same_bits_in_every_batch(inputs, dtype):
    _, _, layer = make(48, inputs, dtype)
    x = torch.randn(203, inputs).to(dtype)
    alone = torch.cat([layer(row[None]) for row in x])
    for rows in (*range(2, 41), 64, 100, 203):
        assert torch.equal(layer(x[:rows]), alone[:rows]), (
            f"with {rows} rows the sums are added in another order; it may depend only on the number of inputs"
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, inputs", [(700, 1024), (300, 5001), (100, 40_000)])  # many blocks; as many as groups
def test_blocks_of_rows_leave_none_out_and_change_no_bit(rows, inputs, dtype):
    _, _, layer = make(40, inputs, dtype)
    x = torch.randn(rows, inputs).to(dtype)
    got = layer(x)
    few = torch.cat([layer(part) for part in x.split(30)])
    wrong = (got != few).any(1).nonzero().flatten().tolist()
    assert not wrong, f"rows {wrong[:10]} of {rows} differ from the same rows in a small batch"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 96, 1024, 2048, 3072])
def test_rows_of_activations_begin_an_odd_number_of_cache_lines_apart(width, dtype):
    rows = alloc_padded(torch.zeros(3, 1, dtype=dtype), width)
    assert rows.shape == (3, width) and rows.dtype == dtype
    lines, rest = divmod(rows.stride(0) * rows.element_size(), 64)
    assert (lines % 2, rest) == (1, 0), "rows a power of two apart evict each other from the first-level cache"


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(dtype, torch_threads):
    _, _, layer = make(200, 50, dtype)
    x, results = torch.randn(300, 50).to(dtype), []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        results.append(torch.cat([layer(x), layer(x[:17])]))
    assert all(torch.equal(result, results[0]) for result in results), "each sum must be computed by a single thread"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [50, 77])
def test_a_row_of_nan_stays_a_row_of_nan(inputs, dtype):
    _, _, layer = make(33, inputs, dtype)
    x = torch.randn(9, inputs).to(dtype)
    want = layer(x)
    x[4] = float("nan")
    got = layer(x)
    assert got[4].isnan().all(), "a NaN must not disappear"
    kept = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(got[kept], want[kept]), "NaN spread: a row reads past its end or into its neighbour"


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_and_weights_that_are_not_contiguous(dtype):
    weight, _, layer = make(33, 50, dtype)
    wide = torch.randn(9, 120).to(dtype)
    for x in (wide[:, 10:60], wide[::2, 10:60], wide.T[10:60].T, wide[:, ::2][:, :50], wide[:1, ::2][:, :50]):
        assert torch.equal(layer(x), layer(x.clone(memory_format=torch.contiguous_format)))
    odd = torch.randn(50, 33).to(dtype).T  # a weight that is not contiguous
    x = wide[:, :50].contiguous()
    assert relative_error(PackedLinear(functions(dtype), odd)(x), x, odd) < rounding(dtype)
    assert relative_error(layer(x), x, weight) < rounding(dtype)


def test_inputs_of_the_wrong_shape_or_dtype_are_refused():
    _, _, layer = make(33, 50, torch.bfloat16)
    for x in (torch.zeros(2, 50), torch.zeros(2, 51).bfloat16(), torch.zeros(50).bfloat16()):
        with pytest.raises(ValueError):
            layer(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", INSTRUCTIONS)
@pytest.mark.nightly
def test_other_instructions_give_the_same_results(name, dtype):
    if name == "AVX2" and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("NOT CHECKED: AVX2; this processor has none")
    try:
        other = native.Functions(dtype, replace(native.LIBRARY, flag_sets=(INSTRUCTIONS[name],)))
    except UserError as why:
        pytest.skip(f"NOT CHECKED: {name}; {why}")
    for outputs, inputs in SHAPES:
        weight, bias, layer = make(outputs, inputs, dtype, bias=True)
        x = torch.randn(14, inputs).to(dtype)
        got = PackedLinear(other, weight.clone(), bias)(x)
        assert relative_error(got, x, weight, bias) < rounding(dtype)
        torch.testing.assert_close(got, layer(x), atol=rounding(dtype) * 8, rtol=rounding(dtype) * 4)
        alone = torch.cat([PackedLinear(other, weight.clone(), bias)(row[None]) for row in x])
        assert torch.equal(got, alone), "a row's bits depend on the batch with these instructions"
