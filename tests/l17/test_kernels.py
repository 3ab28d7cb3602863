"""Lesson 17. Every kernel over int8 or int4 rows gives what float64 gives over the numbers that the rows stand for."""

import importlib.util
import platform
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.attention.cpu import call
from mini_engine.attention.reference import gather
from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from mini_engine.quantized import cpu
from mini_engine.quantized.formats import FORMATS, INT4, INT8
from tests.l3.kernel_cases import int32, make_case, relative_error
from tests.l3.pickled import Worker
from tests.support import OneOf, refused

pytestmark = pytest.mark.reference  # no task is about this

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
IN_PROCESS = [f"{rows} {name}" for rows in FORMATS for name in ("reference", "torch", "cpu")]
MIXED = [(1, 9), (4, 4), (3, 8), (1, 1), (0, 5), (5, 14)]  # (q_len, kv_len): decodes, a prompt, chunks, no query
SHAPES = {
    "two queries a key head": dict(heads=4, kv_heads=2, dim=32, block_size=4),
    "one query a key head, blocks of 1": dict(heads=2, kv_heads=2, dim=64, block_size=1),
    "five queries a key head, dim 48, blocks of 7": dict(heads=15, kv_heads=3, dim=48, block_size=7),
    "sixteen queries a key head, dim 80": dict(heads=16, kv_heads=1, dim=80, block_size=16),
    "dim 128, blocks of 16": dict(heads=4, kv_heads=2, dim=128, block_size=16),
    "dim 18, whose rows are padded": dict(heads=4, kv_heads=2, dim=18, block_size=3),
    "dim 16": dict(heads=2, kv_heads=2, dim=16, block_size=5),
    "dim 8": dict(heads=3, kv_heads=1, dim=8, block_size=2),
}


def case_of(kernel, lengths, **options):
    """Return a case over the rows that this kernel reads.

    Tokens and heads differ in size, so another row's scale shows in the answer. The histories are rotated back.
    """
    rows = FORMATS[kernel.partition(" ")[0]]
    plain = make_case(lengths, **options)
    sizes = 2.0 ** torch.randint(-2, 2, (*plain.k_cache.shape[:3], 1), generator=torch.Generator().manual_seed(7))
    k, v = (rows.write(x.float() * sizes) for x in (plain.k_cache, plain.v_cache))
    dim, lens = plain.q.shape[2], plain.seq_lens_kv.tolist()
    histories = [
        tuple(rows.read(gather(cache, row, kv_len), dim, torch.float32) for cache in (k, v))
        for row, kv_len in zip(plain.block_table, lens, strict=True)
    ]
    return replace(plain, k_cache=k, v_cache=v, histories=histories)


def inputs_of(case):
    return (*case.inputs[:4], case.q.shape[2] ** -0.5)


@pytest.fixture(scope="module")
def interpreted_triton():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("NOT CHECKED: the Triton kernels; Triton is not installed")
    kernel = Worker("tests.l17.triton_worker")
    yield kernel
    kernel.close()


TRITON = ("int8 triton", "int4 triton")


@pytest.fixture(params=(*IN_PROCESS, *(pytest.param(name, marks=pytest.mark.nightly) for name in TRITON)))
def kernel(request):
    """The name of a kernel."""
    return request.param


@pytest.fixture
def attend(kernel, request):
    """A function that runs the kernel on a case."""
    rows, _, name = kernel.partition(" ")
    if name == "triton":
        interpreted = request.getfixturevalue("interpreted_triton")
        return lambda case: interpreted(rows, *inputs_of(case))
    return lambda case: run(kernel, case)


def run(kernel, case):
    rows, _, name = kernel.partition(" ")
    try:
        loaded = load_kernel(name, "cpu", case.q.dtype, rows)
    except UserError as why:
        pytest.skip(f"NOT CHECKED: the {kernel} kernel; {why}")
    return loaded(*inputs_of(case))


def check(out, case, teach):
    assert out.shape == case.q.shape and out.dtype == case.q.dtype, "the answer has q's shape and dtype"
    assert not out.isnan().any(), f"{teach}: NaN from padding, or from a slot that the sequence does not own"
    error = relative_error(out, case.expected())
    assert error < TOLERANCE[case.q.dtype], f"{teach}: relative error {error:.2g} against float64"


@DTYPES
@pytest.mark.parametrize("shape", SHAPES)
def test_a_mixed_batch_gives_what_float64_gives(kernel, attend, shape, dtype):
    case = case_of(kernel, MIXED, dtype=dtype, **SHAPES[shape])
    check(attend(case), case, shape)


@pytest.mark.ci
@pytest.mark.parametrize("name", TRITON)
def test_triton_s_kernels_give_what_float64_gives(interpreted_triton, name):
    shape = "two queries a key head"
    case = case_of(name, MIXED, **SHAPES[shape])
    check(interpreted_triton(name.split()[0], *inputs_of(case)), case, shape)


@pytest.mark.parametrize("lengths", [[(1, 700), (1, 3)], [(1, 512), (1, 513)], [(20, 530)]], ids=str)
def test_long_histories_give_what_float64_gives(kernel, attend, lengths):
    case = case_of(kernel, lengths, heads=2, kv_heads=1, block_size=16, padded_rows=0)
    check(attend(case), case, f"(q_len, kv_len) {lengths}")


@st.composite
def cases(draw, kernel):
    group, kv_heads = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    kv_lens = draw(st.lists(st.integers(1, 70), min_size=1, max_size=4))
    return case_of(
        kernel,
        [(draw(st.one_of(st.just(1), st.integers(0, kv_len))), kv_len) for kv_len in kv_lens],
        heads=group * kv_heads,
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([8, 16, 18, 32, 48, 64, 80, 128])),
        block_size=draw(st.integers(1, 20)),
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        padding=draw(st.sampled_from([0, -1, 2**31 - 1])),
        seed=draw(st.integers(0, 2**32)),
    )


@pytest.mark.parametrize("name", IN_PROCESS)
def test_any_batch_gives_what_float64_gives(name):
    @settings(max_examples=25, deadline=None)
    @given(case=cases(name))
    def holds(case):
        check(run(name, case), case, f"{name}, {case}")

    holds()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_the_scale_of_a_slot_that_is_not_owned_changes_nothing(kernel, attend, poison):
    clean, poisoned = (case_of(kernel, MIXED, poison=value, padded_rows=0) for value in (1.0, poison))
    assert torch.equal(attend(clean), attend(poisoned)), "a slot past the end of a sequence has any scale at all"


@DTYPES
@pytest.mark.parametrize("name", ["int8 cpu", "int4 cpu"])
def test_in_cpp_a_tokens_bits_do_not_depend_on_batch_blocks_or_chunks(name, dtype):
    shape = dict(heads=6, kv_heads=3, dim=40, dtype=dtype, padded_rows=0)
    lengths = [(1, 1), (1, 513), (90, 300)]
    case = case_of(name, lengths, block_size=16, **shape)
    whole = run(name, case)
    for s, rows in enumerate(case.rows):
        alone = run(name, case.part(s, 0, rows.stop - rows.start))
        assert torch.equal(whole[rows], alone), f"the sequence of {lengths[s]} depends on its batch"
    chunk = run(name, case.part(2, 40, 47))
    assert torch.equal(whole[case.rows[2]][40:47], chunk), "a chunk rounds differently"


@pytest.mark.nightly
@DTYPES
@pytest.mark.parametrize("flags", ["", "-mavx2 -mfma", "-mavx2 -mfma -mf16c"])
@pytest.mark.parametrize("rows", [INT8, INT4], ids=lambda rows: rows.name)
def test_in_cpp_other_processors_instructions_give_what_float64_gives(rows, dtype, flags):
    if flags and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"NOT CHECKED: {flags}; this processor is of another kind")
    library = replace(cpu.LIBRARIES[rows.name], flag_sets=(flags.split(),))
    function = library.function(f"paged_attention_{rows.name}", dtype)
    for shape in SHAPES:
        case = case_of(rows.name, MIXED, dtype=dtype, **SHAPES[shape])
        q, *rest = inputs_of(case)
        out = rows.rotate(call(function, rows.rotate(q), *rest))
        check(out, case, f"{flags}, {shape}")


def test_queries_may_be_a_slice_of_a_wider_tensor(kernel, attend):
    case = case_of(kernel, MIXED, dim=32)
    wide = torch.cat([case.q, torch.full_like(case.q, float("nan"))], dim=1)
    assert torch.equal(attend(case), attend(replace(case, q=wide[:, : case.q.shape[1]])))


REFUSED = {
    "rows of the other format": lambda good: dict(k_cache=case_of("int4", [(1, 6), (2, 3)], padded_rows=0).k_cache),
    "a cache of floats": lambda good: dict(k_cache=make_case([(1, 6), (2, 3)]).k_cache),
    "rows of another head_dim": lambda good: dict(q=good.q[..., :16]),
    "caches of different lengths": lambda good: dict(v_cache=good.v_cache[1:]),
    "a transposed cache": lambda good: dict(v_cache=good.v_cache.transpose(1, 2).contiguous().transpose(1, 2)),
    "heads that do not divide": lambda good: dict(q=good.q[:, :3]),
    "a table of int64": lambda good: dict(block_table=good.block_table.long()),
    "more keys than the table reaches": lambda good: dict(seq_lens_kv=int32([99, 3])),
}


@pytest.mark.parametrize("what", REFUSED)
def test_inputs_that_cannot_be_right_are_refused_in_one_sentence(what):
    good = case_of("int8", [(1, 6), (2, 3)], padded_rows=0)
    case = replace(good, **REFUSED[what](good))
    with pytest.raises(ValueError) as caught:
        load_kernel("reference", rows="int8")(*inputs_of(case))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name in IN_PROCESS if "reference" not in name])
def test_a_block_that_does_not_exist_is_refused(name):
    case = case_of(name, [(1, 9), (1, 5)])
    case.block_table[1, 0] = 10_000
    with pytest.raises((ValueError, IndexError)):
        run(name, case)


def test_kernels_are_chosen_by_lesson_3s_names():
    assert load_kernel("auto", rows="int8").name == OneOf("int8 cpu", "int8 torch")
    assert load_kernel("auto", rows="int4").name == OneOf("int4 cpu", "int4 torch")
    with pytest.raises(UserError) as caught:
        load_kernel("cuda", rows="int8")
    assert "cuda" in str(caught.value) and "reference" in str(caught.value)
    with refused(UserError, "'blockwise' int8 auto reference torch cpu"):
        load_kernel("blockwise", rows="int8")
    with pytest.raises(UserError):
        load_kernel("cpu", "cpu", torch.float16, "int8")


@pytest.mark.parametrize("rows", ["int8", "int4"])
def test_only_triton_s_steps_over_rows_can_be_recorded(rows):
    pytest.importorskip("triton")
    assert [load_kernel(name, "cuda", rows=rows).recordable for name in ("triton", "torch", "reference")] == [1, 0, 0]
