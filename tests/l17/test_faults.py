"""Lesson 17. int4 rows keep a fault of the model visible: NaN, infinities, numbers that float16 cannot hold."""

import pytest
import torch

from mini_engine.attention.contract import Batch
from mini_engine.attention.registry import load_kernel
from mini_engine.quantized.formats import FORMATS, INT4
from mini_engine.quantized.int4_rows import pack, unpack
from tests.kernels.cases import int32

pytestmark = pytest.mark.reference  # no task is about this

NAN, INFINITY = float("nan"), float("inf")


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


def test_keys_with_outliers_of_several_hundred_are_ordinary():
    x = some(4, 128)
    x[:, 7] = 600.0
    back = INT4.read(INT4.write(x), 128, torch.float32)
    assert back.isfinite().all() and (back - x).abs().max() < 30, "rotated, 600 is ±53 in every number"


@pytest.mark.parametrize("where, fault", [*((where, NAN) for where in "qkv"), ("k", INFINITY), ("v", INFINITY)])
@pytest.mark.parametrize("rows, dim", [("int8", 40), ("int8", 128), ("int4", 64), ("int4", 128)])
@pytest.mark.parametrize("name", ["reference", "torch", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_kernel_hides_a_fault(name, dtype, rows, dim, where, fault):
    """C++ multiplies the codes of 128 numbers as they lie there, and widens those of other heads."""
    x = {"q": some(1, 2, dim), "k": some(4, 4, 2, dim), "v": some(4, 4, 2, dim)}
    x[where].view(-1, 2, dim)[6 if where != "q" else 0, 0, 5] = fault
    k, v = (FORMATS[rows].write(x[name]) for name in "kv")
    batch = Batch(int32([0, 1]), int32([16]), int32([[0, 1, 2, 3]]))
    out = load_kernel(name, "cpu", dtype, rows)(x["q"].to(dtype), k, v, batch, 0.125)
    assert not out[0, 0].isfinite().any(), f"{fault} in {where} became ordinary numbers"
    assert out[0, 1].isfinite().all(), "the head that has no fault"
