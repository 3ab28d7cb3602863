"""Lesson 16. Every kernel over latents gives what dense attention in float64 gives, and reads only its own slots."""

import platform
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.attention.contract import Kernel
from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from mini_engine.latents import cpu
from tests.l3.kernel_cases import NAN, int32
from tests.l16.latent_cases import ROUNDED, TOLERANCE, LatentCase, changed_key, latent_case
from tests.support import OneOf

pytestmark = pytest.mark.reference  # the task about a kernel has tests of its own

DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
PLAIN = ("reference", "blockwise", "torch", "cpu")
EACH_KERNEL = pytest.mark.parametrize("kernel", PLAIN)
NIGHTLY = pytest.mark.nightly


def load(name: str, dtype: torch.dtype) -> Kernel:
    """Return the kernel that `name` names."""
    try:
        return load_kernel(name, "cpu", dtype, latents=True)
    except UserError as why:
        pytest.skip(f"NOT CHECKED: the {name} kernel; {why}")


def run(name: str, case: LatentCase) -> torch.Tensor:
    """Return the kernel's answer to a case."""
    return load(name, case.q.dtype)(*case.inputs)


def check(name, case, teach):
    tolerance = ROUNDED if name.endswith(("reference", "torch")) else TOLERANCE
    check_answer(run(name, case), case, teach, tolerance[case.q.dtype])


def check_answer(out, case, teach, tolerance):
    assert out.shape == case.q.shape and out.dtype == case.q.dtype, "the answer has q's shape and dtype"
    assert not out.isnan().any(), f"{teach}: NaN from padding, or from a slot that the sequence does not own"
    error = case.error_of(out)
    assert error < tolerance, f"{teach}: an error of {error:.2g} of the largest sum, against float64"


# ---------------------------------------------------------------- the same as dense attention

MIXED = [(1, 9), (4, 4), (3, 8), (1, 1), (0, 5), (5, 14), (1, 70)]  # decodes, a prompt, chunks, no query
SHAPES = {
    "four heads": dict(heads=4, rank=32, rope=8, block_size=4),
    "one head, blocks of 1": dict(heads=1, rank=16, rope=4, block_size=1),
    "widths that fill no vector": dict(heads=3, rank=20, rope=6, block_size=7),
    "a rank below a vector, a rotary key above it": dict(heads=5, rank=3, rope=40, block_size=5),
    "more rotary than latent numbers": dict(heads=20, rank=33, rope=130, block_size=64),
    "DeepSeek-V3's widths": dict(heads=16, rank=512, rope=64, block_size=16),
}


@EACH_KERNEL
@DTYPES
@pytest.mark.parametrize("shape", SHAPES)
def test_a_mixed_batch_gives_what_dense_attention_gives(kernel, shape, dtype):
    case = latent_case(MIXED, dtype=dtype, **SHAPES[shape])
    check(kernel, case, shape)


@EACH_KERNEL
def test_128_heads_as_in_deepseek_v3(kernel):
    case = latent_case([(1, 90), (2, 40)], heads=128, rank=512, rope=64, block_size=16)
    check(kernel, case, "128 heads of a query fill a task of the C++ kernel")


@EACH_KERNEL
@DTYPES
@pytest.mark.parametrize(
    "lengths",
    [[(1, 512), (1, 513), (2, 1025)], [(1, 1300), (1, 3)], [(40, 600)], [(530, 530), (1, 700)]],
    ids=str,
)
def test_long_histories_give_what_dense_attention_gives(kernel, lengths, dtype):
    case = latent_case(lengths, heads=3, rank=20, rope=6, block_size=16, dtype=dtype)
    check(kernel, case, f"(q_len, kv_len) {lengths}")


@st.composite
def cases(draw):
    kv_lens = draw(st.lists(st.integers(1, 150), min_size=1, max_size=5))
    return latent_case(
        [(draw(st.one_of(st.just(1), st.integers(0, kv_len))), kv_len) for kv_len in kv_lens],
        heads=draw(st.integers(1, 20)),
        rank=draw(st.integers(1, 80)),
        rope=draw(st.integers(1, 20).map(lambda half: 2 * half)),
        block_size=draw(st.integers(1, 64)),
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        padding=draw(st.sampled_from([0, -1, 2**31 - 1])),
        padded_rows=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 99)),
    )


@EACH_KERNEL
@settings(max_examples=30)
@given(case=cases())
def test_any_batch_gives_what_dense_attention_gives(kernel, case):
    check(kernel, case, str(case))


@EACH_KERNEL
@DTYPES
def test_a_crowd_behind_96_shared_keys(kernel, dtype):
    lengths = [(2 if s % 9 == 3 else 1, 98 + s % 13) for s in range(70)]
    plain = latent_case(lengths, heads=4, rank=20, rope=6, block_size=16, dtype=dtype)
    case = plain.with_shared_beginning(96 // 16)
    check(kernel, case, "70 sequences that share 96 keys")
    out = run(kernel, case)
    for s, rows in enumerate(case.rows if kernel == "cpu" else []):
        alone = run(kernel, case.part(s, 0, rows.stop - rows.start))
        assert torch.equal(out[rows], alone), f"sequence {s} rounds otherwise in a crowd"


@NIGHTLY
@EACH_KERNEL
@settings(max_examples=500)
@given(case=cases())
def test_any_of_many_batches_gives_what_dense_attention_gives(kernel, case):
    check(kernel, case, str(case))


# ---------------------------------------------------------------- causality


@EACH_KERNEL
@pytest.mark.parametrize("part", ["c_cache", "r_cache"])
def test_a_query_sees_the_tokens_up_to_its_own(kernel, part):
    """Three queries at positions 6 to 8: token 7 is seen by the last two, whether its latent or its key changes."""
    case = latent_case([(2, 5), (3, 9)], padded_rows=0)
    pair = (case, changed_key(case, 1, 7, lambda case: getattr(case, part)))
    before, after = (run(kernel, x) for x in pair)
    differs = [not torch.equal(before[row], after[row]) for row in range(5)]
    assert differs == [False, False, False, True, True], f"rows of 2 and of 3 queries, when {part} of token 7 changes"


@EACH_KERNEL
@pytest.mark.parametrize("size", [1, 5, 16])
def test_any_chunk_size_gives_the_same_output(kernel, size):
    case = latent_case([(21, 30)], padded_rows=0)
    chunks = [run(kernel, case.part(0, i, min(i + size, 21))) for i in range(0, 21, size)]
    message = f"chunks of {size} differ from a single prefill: is each chunk's mask bottom-right?"
    torch.testing.assert_close(torch.cat(chunks), run(kernel, case), msg=lambda m: f"{message} {m}")


# ---------------------------------------------------------------- slots of others, and padding


@EACH_KERNEL
@DTYPES
@pytest.mark.parametrize("q_lens", [(1, 1, 1), (1, 4, 3)], ids=["decode", "mixed"])
def test_padded_rows_change_nothing_and_give_zeros(kernel, q_lens, dtype):
    lengths = [(q_len, 9) for q_len in q_lens]
    plain, padded = (latent_case(lengths, dtype=dtype, padded_rows=rows) for rows in (0, 5))
    out = run(kernel, padded)
    assert not out[-5:].any(), "rows past cu_seqlens_q[-1] give zeros, although q holds NaN there"
    torch.testing.assert_close(out[:-5], run(kernel, plain), msg=lambda m: f"padding matters. {m}")


@EACH_KERNEL
def test_a_batch_without_sequences_gives_zeros(kernel):
    out = run(kernel, latent_case([], padded_rows=3))
    assert out.shape == (3, 4, 32) and not out.any()


@EACH_KERNEL
def test_a_sequence_without_queries_is_skipped(kernel):
    case = latent_case([(1, 5), (0, 6), (0, 0), (2, 3)])
    case.block_table[1:3] = -1
    check(kernel, case, "a padded sequence's table must not be followed")


@EACH_KERNEL
@pytest.mark.parametrize("lengths", [MIXED, [(1, 9), (1, 40), (1, 2)]], ids=["mixed", "decode"])
@pytest.mark.parametrize("poison", [NAN, float("inf"), -float("inf")])
def test_what_a_sequence_does_not_own_changes_nothing(kernel, poison, lengths):
    pair = (latent_case(lengths, poison=value, block_size=6, padded_rows=0) for value in (1.0, poison))
    clean, poisoned = (run(kernel, case) for case in pair)
    message = "the null block, other blocks and the end of a last block past kv_len must not affect an answer"
    assert torch.equal(poisoned, clean), message


@EACH_KERNEL
@pytest.mark.parametrize("lengths", [MIXED, [(1, 9), (1, 40), (1, 2)]], ids=["mixed", "decode"])
@pytest.mark.parametrize("entry", [0, -1, 2**31 - 1])
def test_table_entries_past_the_needed_ones_are_never_followed(kernel, entry, lengths):
    pair = (latent_case(lengths, padding=padding, padded_rows=0) for padding in (1, entry))
    plain, wild = (run(kernel, case) for case in pair)
    assert torch.equal(wild, plain), f"the kernel followed table entry {entry}, which is past the sequence's blocks"


CHECKED = ("cpu", "blockwise")  # torch takes block -1 for the last one


@pytest.mark.parametrize("kernel, block", [*((name, 10_000) for name in PLAIN), *((name, -1) for name in CHECKED)])
@pytest.mark.parametrize("q_len", [1, 3], ids=["decode", "chunk"])
def test_a_needed_block_that_does_not_exist_is_refused(kernel, q_len, block):
    case = latent_case([(1, 9), (q_len, 12)])
    case.block_table[1, 1] = block
    with pytest.raises((ValueError, IndexError), match=r"block|index"):
        run(kernel, case)


# ---------------------------------------------------------------- C++: the same bits in any batch

LONG = [(1, kv_len) for kv_len in (1, 31, 32, 33, 511, 512, 513, 1100)]


@DTYPES
@pytest.mark.parametrize("heads", [6, pytest.param(130, marks=NIGHTLY)])
def test_batch_and_threads_change_no_bit(heads, dtype):
    case = latent_case([*LONG, (90, 700)], heads=heads, rank=40, rope=10, block_size=16, dtype=dtype)
    before, outs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 7, 40):
            torch.set_num_threads(threads)
            outs.append(run("cpu", case))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(outs[0], out) for out in outs[1:]), "the order of a sum depends on the number of threads"
    for s, rows in enumerate(case.rows):
        alone = run("cpu", case.part(s, 0, rows.stop - rows.start))
        assert torch.equal(outs[0][rows], alone), f"the sequence with kv_len {case.seq_lens_kv[s]} depends on its batch"


@DTYPES
@pytest.mark.parametrize("size", [1, 7, 100, 300])
def test_a_token_has_the_same_bits_in_decode_chunk_and_prefill(size, dtype):
    case = latent_case([(300, 600)], heads=3, rank=40, block_size=16, dtype=dtype, padded_rows=0)
    whole = run("cpu", case)
    for begin in (0, 7 * size % 300, 300 - size):
        chunk = run("cpu", case.part(0, begin, begin + size))
        assert torch.equal(whole[begin : begin + size], chunk), f"a chunk of {size} at {begin} rounds differently"


def test_a_head_has_the_same_bits_among_more_and_fewer():
    case = latent_case([(1, 600), (5, 40)], heads=37, padded_rows=0)
    whole = run("cpu", case)
    for heads in (1, 8, 9, 17):
        some = run("cpu", replace(case, q=case.q[:, :heads], q_rope=case.q_rope[:, :heads]))
        assert torch.equal(some, whole[:, :heads]), f"{heads} heads alone round differently"


@DTYPES
def test_the_block_size_changes_no_bit(dtype):
    sizes = (1, 7, 16, 256)
    cases = [latent_case([(1, 600), (20, 50)], block_size=size, dtype=dtype, poison=0.0) for size in sizes]
    outs = [run("cpu", case) for case in cases]
    assert all(torch.equal(outs[0], out) for out in outs[1:]), "the order of a sum depends on where blocks end"


@EACH_KERNEL
@DTYPES
def test_queries_may_lie_in_memory_as_a_product_left_them(kernel, dtype):
    """einsum makes q a transposed view, and q_rope is the end of each query of nope + rope numbers."""
    case = latent_case(MIXED, dtype=dtype)
    by_head = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    whole = torch.cat([torch.full_like(case.q_rope, NAN), case.q_rope], dim=2)
    across = case.q.transpose(1, 2).contiguous().transpose(1, 2)  # even the numbers of one query lie apart
    for q in (by_head, across):
        views = replace(case, q=q, q_rope=whole[..., case.q_rope.shape[2] :])
        torch.testing.assert_close(run(kernel, views), run(kernel, case), rtol=ROUNDED[dtype], atol=ROUNDED[dtype])


@NIGHTLY
@DTYPES
@pytest.mark.parametrize("flags", ["", "-mavx2 -mfma"])
def test_in_cpp_other_processors_instructions_give_what_dense_attention_gives(flags, dtype):
    if flags and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"NOT CHECKED: {flags}; this processor is of another kind")
    function = replace(cpu.LIBRARY, flag_sets=(flags.split(),)).function("latent_attention", dtype)
    for shape in SHAPES:
        case = latent_case([*MIXED, (1, 600)], dtype=dtype, **SHAPES[shape])
        out = cpu.call(function, *case.inputs)
        check_answer(out, case, f"{flags}, {shape}", TOLERANCE[dtype])


# ---------------------------------------------------------------- bad inputs, and names

GOOD = latent_case([(1, 6), (2, 3)], padded_rows=0)
REFUSED = {
    r"q is torch.float32 \[3, 32\] and q_rope": dict(q=GOOD.q[:, 0]),
    r"\[3, 4, 32\] and q_rope torch.float32 \[3, 3, 8\]": dict(q_rope=GOOD.q_rope[:, :3]),
    r"q_rope torch.bfloat16 \[3, 4, 8\]; they are \[T, H, rank\] and \[T, H, rope\] of one dtype": dict(
        q_rope=GOOD.q_rope.bfloat16()
    ),
    r"c_cache is torch.float32 \[5, 4, 1, 32\]; for queries of 16 numbers it is": dict(q=GOOD.q[..., :16]),
    r"r_cache is .*; for queries of 6 numbers it is": dict(q_rope=GOOD.q_rope[..., :6]),
    r"c_cache is torch.bfloat16 .* it is torch.float32 \[num_blocks, block_size, 1, 32\]": dict(
        c_cache=GOOD.c_cache.bfloat16()
    ),
    r"c_cache is torch.float32 \[5, 4, 2, 32\]": dict(c_cache=GOOD.c_cache.repeat(1, 1, 2, 1)),
    r"c_cache is torch.int8 \[5, 4, 1, 36\]": dict(c_cache=torch.zeros(5, 4, 1, 36, dtype=torch.int8)),
    "r_cache must be contiguous": dict(r_cache=GOOD.r_cache.transpose(0, 1).contiguous().transpose(0, 1)),
    r"c_cache has blocks \[5, 4\], r_cache \[4, 4\]; use one size": dict(r_cache=GOOD.r_cache[1:]),
    "block_table is torch.int64": dict(block_table=GOOD.block_table.long()),
    "q has 3 rows": dict(cu_seqlens_q=int32([0, 1, 5])),
    "sequence 1 has 2 queries and 1 keys": dict(seq_lens_kv=int32([6, 1])),
    "sequence 0 has 99 keys; its row of block_table reaches 12": dict(seq_lens_kv=int32([99, 3])),
}


@pytest.mark.parametrize("message", REFUSED)
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_bad_inputs_are_refused_in_one_sentence(name, message):
    with pytest.raises(ValueError, match=message) as caught:
        run(name, replace(GOOD, **REFUSED[message]))
    assert "\n" not in str(caught.value)


def test_a_refused_table_leaves_the_answer_unwritten():
    """The C++ function looks at every table before it writes: a caller may have given it memory in use."""
    case = latent_case([(1, 9), (1, 5)])
    case.block_table[1, 1] = 10_000
    out = torch.full_like(case.q, 7.0)
    function = cpu.LIBRARY.function("latent_attention", torch.float32)
    pointers = [x.data_ptr() for x in (*case.inputs[:4], out, *case.inputs[4])]
    sizes = cpu.sizes_of(case.q, case.q_rope, case.c_cache, case.block_table)
    assert function(*pointers, sizes, case.scale, 2) == 1, "the sequence whose row of the table is wrong"
    assert (out == 7).all()


def test_kernels_are_chosen_by_lesson_3s_names():
    assert load_kernel("auto", latents=True).name == OneOf("latents cpu", "latents torch")
    with pytest.raises(UserError, match="'triton' reads latents; choose one of auto, reference, blockwise, torch, cpu"):
        load_kernel("triton", latents=True)
    with pytest.raises(UserError, match=r"float32 and bfloat16, not torch\.float16"):
        load_kernel("cpu", "cpu", torch.float16, latents=True)
    with pytest.raises(UserError, match="runs on the CPU, not on meta"):
        load_kernel("cpu", "meta", latents=True)


@DTYPES
def test_a_kernel_loaded_for_one_dtype_is_right_for_another(dtype):
    case = latent_case(MIXED, dtype=dtype)
    for other in TOLERANCE:
        out = load("cpu", other)(*case.inputs)
        check_answer(out, case, f"loaded for {other}: the dtype is q's own", TOLERANCE[dtype])
