"""Course machinery. The choice of a kernel by its name, and inputs that no kernel could answer: one clear sentence."""

import platform
from dataclasses import replace

import pytest
import torch

from mini_engine.attention import cpu
from mini_engine.attention.contract import EVERY_KEY, Kernel, check_inputs
from mini_engine.attention.registry import load_kernel, windowed
from mini_engine.base.errors import UserError
from mini_engine.latents import cpu as latent_cpu
from mini_engine.quantized import cpu as row_cpu
from mini_engine.quantized import latents as row_latents
from mini_engine.quantized.formats import FORMATS
from tests.kernels.cases import MIXED, int32, make_case
from tests.kernels.table import CACHES, CPP, DTYPES, IN_PROCESS, TRITON, WINDOWED, Entry
from tests.support import OneOf, refused

SAFE = [kernel for kernel in IN_PROCESS if kernel.name in ("reference", "cpu")]
LENGTHS = [(1, 6), (2, 3)]


def transposed(x):
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def tables(case):
    """Return, by the values that the message names, tables that fit no batch."""
    starts, lens, table = case.batch
    return {
        "cu_seqlens_q torch.int64 int32": dict(cu_seqlens_q=starts.long()),
        "seq_lens_kv torch.int64": dict(seq_lens_kv=lens.long()),
        "block_table torch.int64": dict(block_table=table.long()),
        "cu_seqlens_q [S + 1]": dict(cu_seqlens_q=int32([0, 3])),
        "block_table 2": dict(block_table=table[:1]),
        "cu_seqlens_q 1 3": dict(cu_seqlens_q=int32([1, 2, 3])),
        "q 3 5": dict(cu_seqlens_q=int32([0, 1, 5])),
        "cu_seqlens_q 3 2 1": dict(cu_seqlens_q=int32([0, 3, 2])),
        "sequence 1 2 queries 1 keys": dict(seq_lens_kv=int32([6, 1])),
        "sequence 0 99 12 block_table": dict(seq_lens_kv=int32([99, 3])),
    }


def wrong_tensors(kernel, case):
    """Return, by the values that the message names, queries and caches that do not fit."""
    q, k, v = case.q, *case.caches
    name = "c_cache" if kernel.latents else "k_cache"
    wrong = {
        "q [T, H": dict(queries=(q[0], *case.queries[1:])),
        "16": dict(queries=(q[..., :16], *case.queries[1:])),
        "torch.int16": dict(caches=(k.to(torch.int16), v)),
        "contiguous": dict(caches=(k, transposed(v))),
        "cache [4,": dict(caches=(k, v[1:])),
    }
    if kernel.latents:
        wrong |= {
            "q_rope [3, 3, 8]": dict(queries=(q, case.queries[1][:, :3])),
            "q_rope torch.bfloat16": dict(queries=(q, case.queries[1].bfloat16())),
            "r_cache 16": dict(queries=(q, case.queries[1].repeat(1, 1, 2))),
            "c_cache [5, 4, 2": dict(caches=(k.repeat(1, 1, 2, 1), v)),
        }
    else:
        wrong["3 2 heads"] = dict(queries=(q[:, :3],))
    for rows in {None, *FORMATS} - {kernel.rows}:
        other = Entry("reference", rows, kernel.latents).case(LENGTHS, padded_rows=0).caches
        says = f"{name} {other[0].dtype}" if kernel.rows or kernel.latents else "32"
        wrong[f"cache {says}"] = dict(caches=other)
    return wrong


@pytest.mark.parametrize("kernel", SAFE, ids=str)
def test_inputs_that_cannot_be_right_are_refused(kernel):
    attend, good = kernel.load(), kernel.case(LENGTHS, padded_rows=0)
    attend(*good.inputs)
    for values, change in tables(good).items():
        with refused(ValueError, values):
            attend(*good.with_tables(**change).inputs)
    for values, change in wrong_tensors(kernel, good).items():
        with refused(ValueError, values):
            attend(*replace(good, **change).inputs)


def test_a_sequence_may_reach_to_the_end_of_its_row_of_the_table_and_no_further():
    good = make_case(LENGTHS, padded_rows=0)  # rows of 3 blocks of 4 slots
    *fits, _ = good.with_tables(seq_lens_kv=int32([12, 3])).inputs
    check_inputs(*fits)
    *too_long, _ = good.with_tables(seq_lens_kv=int32([13, 3])).inputs
    with refused(ValueError, "13 12 block_table"):
        check_inputs(*too_long)


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("rows, latents", CACHES)
def test_kernels_are_chosen_by_the_same_names_for_every_cache(rows, latents):
    title = Entry("", rows, latents).wanted().title
    wanted = dict(rows=rows, latents=latents)
    assert load_kernel("auto", **wanted).name == OneOf(f"{title} cpu".strip(), f"{title} torch".strip())
    with refused(UserError, f"'cuda' auto reference torch cpu {title}"):
        load_kernel("cuda", **wanted)
    with refused(UserError, "float32 bfloat16 torch.float16"):
        load_kernel("cpu", "cpu", torch.float16, **wanted)
    with refused(UserError, "cpu meta"):
        load_kernel("cpu", "meta", **wanted)


def test_a_kernel_that_there_is_not_is_refused():
    for rows, latents, name in (("int8", False, "blockwise"), ("int4", True, "triton"), (None, True, "triton")):
        with refused(UserError, f"'{name}' auto reference torch cpu"):
            load_kernel(name, rows=rows, latents=latents)
    with pytest.raises(UserError, match=r"[Tt]riton"):
        load_kernel("triton", "cpu")


def test_auto_is_the_fastest_and_says_once_where_it_settles_for_less(capfd):
    Entry("cpu").load()  # skipped where there is no compiler
    assert load_kernel("auto").name == "cpu"
    names = {load_kernel("auto", "cpu", torch.float16).name for _ in range(2)}
    assert names == {"torch"}, "the C++ kernel has no float16; torch does"
    assert capfd.readouterr().err.count("Using the torch kernel") == 1


@pytest.mark.parametrize("kernel", TRITON, ids=str)
def test_only_triton_s_steps_can_be_recorded(kernel):
    pytest.importorskip("triton")
    names = ("triton", "torch", "reference")
    assert [load_kernel(name, "cuda", rows=kernel.rows).recordable for name in names] == [True, False, False]


@pytest.mark.parametrize("kernel", WINDOWED, ids=str)
def test_a_windowed_kernel_keeps_its_name_and_what_it_checks(kernel):
    plain, case = kernel.load(), kernel.case([(5, 9)], window=4)
    got = windowed(plain, 4)
    assert got.name == plain.name and type(got) is type(plain)
    assert torch.equal(got(*case.inputs), kernel(case)), "windowed gives what load_kernel with a window gives"
    with pytest.raises(ValueError, match="cache"):
        got(*replace(case, caches=tuple(x.to(torch.int16) for x in case.caches)).inputs)


def test_an_unknown_kernel_and_an_empty_window_are_refused():
    with refused(UserError, "'mine' windowed"):
        windowed(Kernel("mine", cpu.scalar_attention), 4)
    with refused(ValueError, "window 0 keys"):
        windowed(load_kernel("reference"), 0)


# ---------------------------------------------------------------- machine code


def test_a_kernel_loaded_for_one_dtype_is_right_for_another(cpp, dtype):
    """`load_kernel("cpu")` alone means float32; a float32 function would read past the end of bfloat16 tensors."""
    case = cpp.case(MIXED, dtype=dtype)
    for other in DTYPES:
        assert case.error_of(cpp.load(other)(*case.inputs)) < cpp.tolerance(dtype), "the dtype is q's own"


@pytest.mark.nightly
@pytest.mark.parametrize("flags", ["", "-mavx2 -mfma", "-mavx2 -mfma -mf16c"])
@pytest.mark.parametrize("kernel", CPP, ids=str)
def test_other_processors_instructions_give_what_float64_gives(kernel, dtype, flags, monkeypatch):
    if flags and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"NOT CHECKED: {flags}; this processor is of another kind")
    built = dict(flag_sets=(flags.split(),))
    for module in (cpu, latent_cpu, row_latents):
        monkeypatch.setattr(module, "LIBRARY", replace(module.LIBRARY, **built))
    monkeypatch.setitem(row_cpu.LIBRARIES, str(kernel.rows), replace(row_cpu.LIBRARIES[kernel.rows or "int8"], **built))
    for width in (8, 18, 40, 64, 96, 128, 256):
        for window in kernel.windows(EVERY_KEY, 17):
            case = kernel.case([*MIXED, (1, 600)], dim=width, rope=width // 4 * 2, window=window, dtype=dtype)
            kernel.check(case, f"{flags}, {width} numbers")
