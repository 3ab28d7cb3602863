"""Lesson 17. The Triton kernels over rows, compiled for GPUs that are not here: they fit."""

import pytest

pytest.importorskip("triton", reason="Triton is for Linux")

from scripts.bench.compiled import Load, can_run
from scripts.bench.gpu_target import POINTERS, SHARED_BYTES

from tests.l3.test_triton_compiled import check

pytestmark = pytest.mark.reference  # no task is about this
ROWS = pytest.mark.parametrize("kv_dtype", ["int8", "int4"])


@pytest.mark.ci
@ROWS
@pytest.mark.parametrize("q_len", [1, 2048], ids=["decode", "prefill"])
def test_kernels_over_rows_fit_an_h100(kv_dtype, q_len):
    check(Load(8, q_len, 2048, "bfloat16", kv_dtype=kv_dtype), 90)


@pytest.mark.nightly
@ROWS
@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("dtype", POINTERS)
@pytest.mark.parametrize("shape", [(16, 8, 128), (16, 2, 64), (6, 2, 80)], ids=str)
def test_decodes_over_rows_of_every_shape_fit_every_gpu(kv_dtype, shape, dtype, capability):
    """Prompts in float32 do spill; rows are for decodes, and there is no such GPU here to find a better tile on."""
    heads, kv_heads, dim = shape
    load = Load(8, 1, 2048, dtype, heads, kv_heads, dim, kv_dtype=kv_dtype)
    if can_run(load, capability):
        check(load, capability)


def test_the_paper_counts_the_bytes_of_rows():
    loads = [Load(1, 1, 1000, "float16", 2, 2, 128, kv_dtype=kv_dtype) for kv_dtype in ("auto", "int8", "int4")]
    moved = [load.bytes_moved - 2 * 2 * 128 * 2 for load in loads]  # without queries and results
    assert moved == [2 * 1000 * 2 * size for size in (256, 132, 80)]
