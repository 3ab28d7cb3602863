"""Lesson 10. The kernels between a layer's matrices, compiled for GPUs that are not here: they all fit."""

import pytest

pytest.importorskip("triton", reason="Triton is for Linux")

from scripts.bench.gpu_target import POINTERS, SHARED_BYTES, compile_for

from mini_engine.layers.layer_kernels import (
    _add_norm,
    _norm_rope,
    _silu_mul,
    norm_constants,
    rope_constants,
    silu_constants,
)

pytestmark = pytest.mark.reference
nightly = pytest.mark.nightly
# hidden size, heads, heads of keys and values, their size, intermediate size; the first is Qwen3-0.6B's
SHAPES = [(1024, 16, 8, 128, 3072), (5120, 64, 8, 128, 25600), (640, 6, 2, 80, 1000), (8192, 8, 1, 256, 29568)]


def check(shape, dtype, capability):
    """Compile each kernel as the engine would launch it."""
    hidden, heads, kv_heads, dim, intermediate = shape
    rope = ("qkv", "weights", "cos", "sin", "q_out", "k_out", "v_out")
    for kernel, pointers, constants in (
        (_add_norm, ("x", "delta", "weight", "out"), norm_constants(hidden, True)),
        (_norm_rope, rope, rope_constants(heads, kv_heads, dim)),
        (_silu_mul, ("gate_up", "out"), silu_constants(intermediate)),
    ):
        types = dict.fromkeys(pointers, POINTERS[dtype]) | {"rows": "*i64", "eps": "fp32"}
        found, name = compile_for(kernel, types, constants, capability), kernel.__name__
        assert found.spilled == 0, f"{name}, sm_{capability}: every thread spills {found.spilled} bytes; use more warps"
        assert found.shared <= SHARED_BYTES[capability], (
            f"{name}, sm_{capability}: {found.shared} bytes of shared memory"
        )


@pytest.mark.ci
def test_qwen3_0_6b_s_kernels_fit_an_h100():
    check(SHAPES[0], "bfloat16", 90)


@nightly
@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("dtype", POINTERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_of_every_shape_fit_every_gpu(shape, dtype, capability):
    if dtype != "bfloat16" or capability >= 80:
        check(shape, dtype, capability)


@pytest.mark.parametrize("kernel", [_add_norm, _norm_rope, _silu_mul], ids=lambda kernel: kernel.__name__)
def test_no_number_of_a_step_is_an_argument(kernel):
    """Triton recompiles for a number that is 1 or a multiple of 16; here the grid alone says how many rows."""
    constants = {param.name for param in kernel.params if param.is_constexpr}
    numbers = set(kernel.arg_names) - constants
    assert numbers <= {
        *("x", "delta", "weight", "out", "eps", "qkv", "weights", "cos", "sin"),
        *("rows", "q_out", "k_out", "v_out", "gate_up"),
    }, "only tensors and eps"
