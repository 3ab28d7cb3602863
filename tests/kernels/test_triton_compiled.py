"""Course machinery. The Triton kernels compiled for GPUs that are not here: they fit, and one serves all lengths."""

import pytest

pytest.importorskip("triton", reason="Triton is for Linux")

from scripts.bench.compiled import Load, can_run, compile_attend, compile_merge
from scripts.bench.gpu_target import POINTERS, SHARED_BYTES

from mini_engine.attention.triton_kernel import _attend, _merge

FORMATS = ("auto", "int8", "int4")


def check(load: Load, capability: int) -> None:
    found = compile_attend(load, capability)
    assert found.spilled == 0, (
        f"{load.name}, sm_{capability}: {found.spilled} bytes of every thread go to memory beside {found.registers} "
        "registers. Take fewer rows or keys, or more warps"
    )
    room = SHARED_BYTES[capability]
    assert found.shared <= room, f"{load.name}: {found.shared} bytes of shared memory; sm_{capability} has {room}"


@pytest.mark.ci
@pytest.mark.parametrize("changes", [{}, {"window": 512}, {"kv_dtype": "int8"}, {"kv_dtype": "int4"}], ids=str)
@pytest.mark.parametrize("q_len", [1, 2048], ids=["decode", "prefill"])
def test_qwen3_s_kernels_fit_an_h100(q_len, changes):
    check(Load(8, q_len, 2048, "bfloat16", **changes), 90)


@pytest.mark.nightly
@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("dtype", POINTERS)
@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("shape", [(16, 8, 128), (16, 2, 64), (8, 1, 256), (6, 2, 80)], ids=str)
@pytest.mark.parametrize("q_len", [1, 512], ids=["decode", "prefill"])
def test_kernels_of_every_shape_fit_every_gpu(q_len, shape, kv_dtype, dtype, capability):
    """Over rows, decodes: prompts in float32 and heads of 256 do spill, and no such GPU is here to find a tile on."""
    if kv_dtype != "auto" and (q_len > 1 or shape[2] == 256):
        pytest.skip("rows are for decodes")
    heads, kv_heads, dim = shape
    load = Load(8, q_len, 2048, dtype, heads, kv_heads, dim, kv_dtype=kv_dtype)
    if can_run(load, capability):
        check(load, capability)


@pytest.mark.nightly
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_the_merge_of_the_splits_fits(capability):
    found = compile_merge(Load(8, 1, 2048, "float16", dim=256), capability)
    assert found.spilled == 0 and found.shared <= SHARED_BYTES[capability]


def test_the_splits_of_a_decode_cover_its_window_and_no_more():
    assert [Load(8, 1, 4096, "bfloat16", window=w).config(90).splits for w in (256, 257, 512, 4096)] == [1, 2, 2, 16]
    assert compile_merge(Load(8, 1, 4096, "bfloat16", window=512), 90).spilled == 0


def test_no_number_of_a_step_makes_another_kernel():
    """Triton recompiles for a number that is 1 or a multiple of 16, unless it is told not to; in the middle of
    serving that stops everything for seconds."""
    for kernel in (_attend, _merge):
        numbers = {"num_seqs", "max_blocks", "tiles", "splits"} & set(kernel.arg_names)
        assert numbers <= {param.name for param in kernel.params if param.do_not_specialize}
