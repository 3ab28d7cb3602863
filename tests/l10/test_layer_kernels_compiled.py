"""Lesson 10. The kernels between a layer's matrices, compiled for GPUs that are not here: they all fit."""

import pytest

pytest.importorskip("triton", reason="Triton is for Linux")

from scripts.bench.compiled_layers import LayerLoad, compile_between
from scripts.bench.gpu_target import POINTERS, SHARED_BYTES

from mini_engine.layers.layer_kernels import _add_norm, _norm_rope, _silu_mul

pytestmark = pytest.mark.reference
nightly = pytest.mark.nightly
SHAPES = [(1024, 16, 8, 128, 3072), (5120, 64, 8, 128, 25600), (640, 6, 2, 80, 1000), (8192, 8, 1, 256, 29568)]


def check(load, capability):
    for name, _, found in compile_between(load, capability):
        assert found.spilled == 0, f"{name}, sm_{capability}: every thread spills {found.spilled} bytes; use more warps"
        assert found.shared <= SHARED_BYTES[capability], (
            f"{name}, sm_{capability}: {found.shared} bytes of shared memory"
        )


@pytest.mark.ci
def test_qwen3_0_6b_s_kernels_fit_an_h100():
    check(LayerLoad(32, "bfloat16"), 90)


@nightly
@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("dtype", POINTERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_of_every_shape_fit_every_gpu(shape, dtype, capability):
    if dtype != "bfloat16" or capability >= 80:
        check(LayerLoad(1, dtype, *shape), capability)


@pytest.mark.parametrize("kernel", [_add_norm, _norm_rope, _silu_mul], ids=lambda kernel: kernel.__name__)
def test_no_number_of_a_step_is_an_argument(kernel):
    """Triton recompiles for a number that is 1 or a multiple of 16; here the grid alone says how many rows."""
    constants = {param.name for param in kernel.params if param.is_constexpr}
    numbers = set(kernel.arg_names) - constants
    assert numbers <= {
        *("x", "delta", "weight", "out", "eps", "qkv", "weights", "cos", "sin"),
        *("rows", "q_out", "k_out", "v_out", "gate_up"),
    }, "only tensors and eps"
