"""Lesson 17. int4 rows keep a fault of the model visible: NaN, infinities, numbers that float16 cannot hold."""

import pytest
import torch

from mini_engine.attention.contract import Batch
from mini_engine.attention.registry import load_kernel
from mini_engine.quantized.formats import FORMATS, INT4
from mini_engine.quantized.int4_rows import pack, unpack
from tests.kernels.cases import int32

pytestmark = pytest.mark.reference  # no task is about this


def some(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), -float("inf"), 2e6, -1e5])
@pytest.mark.parametrize("dim", [18, 64, 128])
def test_a_fault_in_k_or_v_stays_visible_in_its_group(fault, dim):
    x = some(2, 2, dim)
    x[1, 0, 3] = fault
    back = unpack(pack(x), dim)
    assert not back[1, 0, :18].isfinite().all(), f"{fault} became ordinary numbers, which would hide an overflow"
    assert back[0].isfinite().all() and back[1, 1].isfinite().all(), "other vectors are not affected"
    assert back[1, 0, 32:].isfinite().all(), "nor are other groups"


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), 1e9])
@pytest.mark.parametrize("rows", FORMATS)
def test_a_fault_reaches_the_pool(rows, fault):
    x = some(3, 2, 64)
    x[1, 0, 3] = fault
    back = FORMATS[rows].read(FORMATS[rows].write(x), 64, torch.float32)
    assert back[0].isfinite().all() and back[1, 1].isfinite().all()
    assert (rows == "int8" and fault == 1e9) or not back[1, 0].isfinite().any(), "a rotation spreads it over the vector"


def test_keys_with_outliers_of_several_hundred_are_ordinary():
    x = some(4, 128)
    x[:, 7] = 600.0
    back = INT4.read(INT4.write(x), 128, torch.float32)
    assert back.isfinite().all() and (back - x).abs().max() < 30, "rotated, 600 is ±53 in every number"


@pytest.mark.parametrize("name", ["reference", "torch", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_kernel_hides_a_fault(name, dtype):
    q, k = some(1, 2, 64).to(dtype), some(4, 4, 2, 64)
    k[2, 1, 0, 5] = float("nan")
    cache, batch = INT4.write(k), Batch(int32([0, 1]), int32([16]), int32([[0, 1, 2, 3]]))
    out = load_kernel(name, "cpu", dtype, "int4")(q, cache, cache, batch, 0.125)
    assert out[0, 0].isnan().all() and out[0, 1].isfinite().all(), "the head whose history has a NaN, and no other"
