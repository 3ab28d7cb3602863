"""Lesson 3. One contract, several kernels: each matches a plain float64 loop and reads only its own slots."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.attention import blockwise, cpu
from mini_engine.attention.contract import Kernel, check_inputs
from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from tests.l3.kernel_cases import NAN, int32, make_case, relative_error, with_shared_beginnings
from tests.l3.new_memory import NewMemory
from tests.l3.pickled import Worker
from tests.support import refused

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
IN_PROCESS = ("reference", "blockwise", "torch", "scalar C++", "cpu")
ON_GPU = ("triton on cuda", "torch on cuda") if torch.cuda.is_available() else ()
EVERYWHERE = (*IN_PROCESS, pytest.param("interpreted triton", marks=pytest.mark.nightly), *ON_GPU)


@pytest.fixture(scope="module")
def interpreted_triton():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("NOT CHECKED: the Triton kernel; Triton is not installed")
    kernel = Worker("tests.l3.triton_worker")
    yield kernel
    kernel.close()


def attend_with(name, case, request):
    """Run the kernel of that name on `case` and return the answer on the CPU."""
    if name == "interpreted triton":
        return request.getfixturevalue("interpreted_triton")(*case.inputs)
    name, _, device = name.partition(" on ")
    inputs = case.on(device or "cpu")
    try:
        if name == "scalar C++":
            return Kernel(name, cpu.scalar_attention)(*inputs)
        kernel = load_kernel(name, device or "cpu", case.q.dtype)
    except UserError as why:
        pytest.skip(f"NOT CHECKED: the {name} kernel; {why}")
    return kernel(*inputs).cpu()


@pytest.fixture(params=EVERYWHERE)
def attend(request):
    return lambda case: attend_with(request.param, case, request)


@pytest.fixture(params=IN_PROCESS)
def attend_fast(request):
    return lambda case: attend_with(request.param, case, request)


def test_kernels_are_checked_on_a_gpu_too():
    if not ON_GPU:
        pytest.skip("NOT CHECKED: kernels on a GPU; torch finds none here")


@pytest.fixture
def attend_cpp(request):
    return lambda case: attend_with("cpu", case, request)


def check(attend, case, teach):
    out = attend(case)
    assert out.shape == case.q.shape and out.dtype == case.q.dtype, "the answer has q's shape and dtype"
    assert not out.isnan().any(), f"{teach}: NaN from padding, or from a slot that the sequence does not own"
    error = relative_error(out, case.expected())
    assert error < TOLERANCE[case.q.dtype], f"{teach}: relative error {error:.2g} against float64"


MIXED = [(1, 9), (4, 4), (3, 8), (1, 1), (5, 14)]  # (q_len, kv_len): decodes, a prompt, chunks behind a history
SHAPES = {
    "two queries a key head": dict(heads=4, kv_heads=2, dim=32, block_size=4),
    "one query a key head, blocks of 1": dict(heads=2, kv_heads=2, dim=64, block_size=1),
    "five queries a key head, dim 48, blocks of 7": dict(heads=15, kv_heads=3, dim=48, block_size=7),
    "sixteen queries a key head, dim 80": dict(heads=16, kv_heads=1, dim=80, block_size=16),
    "dim 96, blocks of 3": dict(heads=8, kv_heads=4, dim=96, block_size=3),
    "dim 256, a block longer than any history": dict(heads=6, kv_heads=2, dim=256, block_size=256),
    "dim 8": dict(heads=3, kv_heads=1, dim=8, block_size=2),
    "dim 40": dict(heads=2, kv_heads=1, dim=40, block_size=5),
}


@DTYPES
@pytest.mark.parametrize("shape", SHAPES)
def test_a_mixed_batch_gives_what_float64_gives(attend, shape, dtype):
    check(attend, make_case(MIXED, dtype=dtype, **SHAPES[shape]), shape)


@pytest.mark.ci
@pytest.mark.parametrize("shape", ["two queries a key head", "dim 40"])
def test_triton_s_kernel_gives_what_float64_gives(interpreted_triton, shape):
    check(lambda case: interpreted_triton(*case.inputs), make_case(MIXED, **SHAPES[shape]), shape)


@DTYPES
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 1300)],
        [(40, 600)],
        [(530, 530)],
        [(70, 1100), (1, 3)],
        [(1, 512), (1, 513), (2, 1025), (0, 0)],
        [(70, 700), (1, 1100), (0, 0), (1, 257), (1, 3)],
    ],
    ids=str,
)
def test_long_histories_give_what_float64_gives(attend_fast, lengths, dtype):
    check(attend_fast, make_case(lengths, dim=64, block_size=16, dtype=dtype), f"(q_len, kv_len) {lengths}")


def test_a_long_history_is_split_and_merged(attend):
    check(attend, make_case([(1, 700), (1, 3)], heads=2, kv_heads=1, block_size=16, padded_rows=0), "decode")


def test_a_long_decode_beside_a_chunk_is_split_and_merged(attend):
    lengths = [(3, 40), (1, 700), (0, 0), (1, 257), (2, 2)]
    check(attend, make_case(lengths, heads=2, kv_heads=1, block_size=16), "decodes beside a prompt's chunk")


@pytest.mark.nightly
def test_a_decode_is_split_by_its_own_length_alone(interpreted_triton):
    case = make_case([(1, 700), (1, 1500), (1, 3)], heads=2, kv_heads=1, block_size=16, padded_rows=0)
    together = interpreted_triton(*case.inputs)
    for s in range(3):
        alone = case.part(s, 0, 1)
        alone = replace(alone, block_table=alone.block_table[:, : int(alone.seq_lens_kv[0]) // 16 + 1])
        assert torch.equal(together[s], interpreted_triton(*alone.inputs)[0]), "its bits depend on the batch"


@st.composite
def cases(draw):
    group, kv_heads = draw(st.integers(1, 16)), draw(st.integers(1, 4))
    kv_lens = draw(st.lists(st.integers(1, 70), min_size=1, max_size=5))
    return make_case(
        [(draw(st.one_of(st.just(1), st.integers(0, kv_len))), kv_len) for kv_len in kv_lens],
        heads=group * kv_heads,
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([8, 16, 24, 32, 48, 64, 80, 96, 128])),
        block_size=draw(st.integers(1, 20)),
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        padding=draw(st.sampled_from([0, -1, 2**31 - 1])),
        padded_rows=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("name", IN_PROCESS)
def test_any_batch_gives_what_float64_gives(name, request):
    @settings(max_examples=20)
    @given(case=cases())
    def holds(case):
        check(lambda c: attend_with(name, c, request), case, str(case))

    holds()


# ---------------------------------------------------------------- causality


@pytest.mark.parametrize("q_len, kv_len", [(2, 9), (3, 4), (5, 37)])
def test_a_suffix_behind_a_prefix_is_masked_bottom_right(attend, q_len, kv_len):
    case = make_case([(q_len, kv_len)])
    check(attend, case, "query i sees keys 0 … kv_len - q_len + i")
    k, v = case.histories[0]
    later = replace(case, k_cache=case.k_cache.clone(), v_cache=case.v_cache.clone())
    last = (later.k_cache == k[-1]).flatten(2).all(2).nonzero()[0].tolist()
    later.k_cache[tuple(last)], later.v_cache[tuple(last)] = -k[-1], 9 * v[-1]
    out, changed = attend(case), attend(later)
    assert torch.equal(out[: q_len - 1], changed[: q_len - 1]), "only the last query sees the last key"
    assert not torch.equal(out[q_len - 1], changed[q_len - 1]), "the last query sees every key, its own included"


def test_a_mixed_batch_equals_its_sequences_one_by_one(attend):
    case = make_case(MIXED)
    out = attend(case)
    for s, rows in enumerate(case.rows):
        alone = attend(case.part(s, 0, rows.stop - rows.start))
        torch.testing.assert_close(
            out[rows], alone, msg=lambda m, s=s: f"sequence {s} depends on the others in the batch. {m}"
        )


@pytest.mark.parametrize("size", [1, 5, 16])
def test_any_chunk_size_gives_the_same_output(attend, size):
    case = make_case([(21, 30)], padded_rows=0)
    chunks = [attend(case.part(0, i, min(i + size, 21))) for i in range(0, 21, size)]
    message = f"chunks of {size} differ from a single prefill: is each chunk's mask bottom-right?"
    torch.testing.assert_close(torch.cat(chunks), attend(case), msg=lambda m: f"{message} {m}")


# ---------------------------------------------------------------- slots of others, and padding


def test_padded_rows_change_nothing_and_give_zeros(attend):
    plain, padded = make_case(MIXED, padded_rows=0), make_case(MIXED, padded_rows=5)
    out = attend(padded)
    assert not out[-5:].any(), "rows past cu_seqlens_q[-1] give zeros, although q holds NaN there"
    assert torch.equal(out[:-5], attend(plain)), "padded rows change no other row"


def test_a_sequence_without_queries_is_skipped(attend):
    case = make_case([(1, 5), (0, 6), (0, 0), (2, 3)])
    case.block_table[1:3] = -1
    check(attend, case, "a padded sequence's table must not be followed")


@pytest.mark.parametrize("poison", [NAN, float("inf"), -float("inf")])
def test_what_a_sequence_does_not_own_changes_nothing(attend, poison):
    clean, poisoned = make_case(MIXED, poison=1.0, padded_rows=0), make_case(MIXED, poison=poison, padded_rows=0)
    message = "the null block, other blocks and the end of a last block past kv_len must not affect an answer"
    assert torch.equal(attend(clean), attend(poisoned)), message


@pytest.mark.parametrize("entry", [0, -1, 2**31 - 1])
def test_table_entries_past_the_needed_ones_are_never_followed(attend, entry):
    plain, wild = make_case(MIXED, padding=1), make_case(MIXED, padding=entry)
    assert torch.equal(attend(plain), attend(wild)), (
        f"the kernel followed table entry {entry}, which is past the sequence's blocks"
    )


@pytest.mark.parametrize("block", [-1, 10_000])
def test_a_needed_block_that_does_not_exist_is_refused(attend_fast, block):
    case = make_case([(1, 9), (1, 5)])
    case.block_table[1, 0] = block
    with pytest.raises((ValueError, IndexError), match=r"block|index"):
        attend_fast(case)


# ---------------------------------------------------------------- in place, block by block


def test_the_blockwise_kernel_allocates_no_more_for_a_longer_history():
    peaks = {name: [peak_of(load_kernel(name), kv_len) for kv_len in (64, 1024)] for name in ("blockwise", "reference")}
    assert len(set(peaks["blockwise"])) == 1, (
        f"bytes for 64 and for 1,024 keys: {peaks['blockwise']}; something is kept"
    )
    assert peaks["reference"][1] > 8 * peaks["reference"][0], (
        "the reference gathers; if this does not show, nothing does"
    )


def peak_of(kernel, kv_len):
    case = make_case([(1, kv_len)])
    with NewMemory(*case.tensors) as new:
        kernel(*case.inputs)
    return new.peak


def test_a_caller_may_watch_each_block():
    case, seen = make_case([(2, 9)]), []
    blocks = case.block_table[0].tolist()
    q = case.q[case.rows[0]]
    out = blockwise.attend_blocks(
        q, case.k_cache, case.v_cache, blocks, 9, 0.5, lambda *kept: seen.append([x.clone() for x in kept])
    )
    assert [scores.shape[-1] for scores, *_ in seen] == [4, 4, 1], "the scores of each block's keys, in order"
    _, largest, total, sums = seen[-1]
    assert torch.equal((sums / total).flatten(1, 2), out), "what is left after the last block is the answer"
    assert torch.equal(largest[..., 0], torch.cat([scores for scores, *_ in seen], -1).amax(-1)), "over all blocks"


# ---------------------------------------------------------------- the C++ kernel: the same bits in any batch

LONG = [(1, kv_len) for kv_len in (1, 15, 16, 17, 511, 512, 513, 1100)]


@DTYPES
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(attend_cpp, dtype):
    case = make_case([*LONG, (90, 700)], heads=6, kv_heads=3, dim=64, block_size=16, dtype=dtype)
    out = attend_cpp(case)
    for s, rows in enumerate(case.rows):
        alone = attend_cpp(case.part(s, 0, rows.stop - rows.start))
        assert torch.equal(out[rows], alone), f"the sequence with kv_len {case.seq_lens_kv[s]} depends on its batch"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_decodes_that_share_blocks_get_the_bits_that_they_get_alone(data):
    """Lesson 8 lets requests share blocks; the kernel reads their keys once, and no request's result may change."""
    size = data.draw(st.sampled_from([4, 16, 32]), "block size")
    count = data.draw(st.integers(2, 12), "sequences")
    lengths = [
        (data.draw(st.sampled_from([1, 1, 1, 5]), "queries"), data.draw(st.integers(5, 1200), "keys"))
        for _ in range(count)
    ]
    groups = [data.draw(st.integers(0, 2), "group") for _ in range(count)]
    blocks = [data.draw(st.integers(0, 1100), "shared keys") // size for _ in range(count)]
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]), "dtype")
    dim = data.draw(st.sampled_from([32, 40]), "head_dim")
    heads, kv_heads = data.draw(st.sampled_from([(4, 2), (32, 1)]), "heads")  # 32: a tile holds four queries
    plain = make_case(lengths, heads, kv_heads, dim, size, dtype)
    case = with_shared_beginnings(plain, groups, blocks)
    out = attend_with("cpu", case, None)
    assert relative_error(out, case.expected()) < TOLERANCE[dtype]
    for s, rows in enumerate(case.rows):
        alone = attend_with("cpu", case.part(s, 0, rows.stop - rows.start), None)
        assert torch.equal(out[rows], alone), f"sequence {s} rounds otherwise beside those it shares with"


@DTYPES
@pytest.mark.parametrize("shared", [80, 512, 700])
def test_a_run_may_fill_several_tiles_and_several_stretches(attend_cpp, dtype, shared):
    plain = make_case([(1, shared + n) for n in (1, 3, 16, 40, 400, 530)], 32, 1, block_size=16, dtype=dtype)
    case = with_shared_beginnings(plain, [0] * 6, [shared // 16] * 6)
    out = attend_cpp(case)
    for s, rows in enumerate(case.rows):
        assert torch.equal(out[rows], attend_cpp(case.part(s, 0, 1))), f"sequence {s} of six that share {shared} keys"


def test_shared_keys_are_read_once_per_run(attend_cpp):
    """Two system prompts, interleaved; one chat that prefills; one whose beginning is too short to be worth a run."""
    lengths = [(1, 300), (1, 333), (1, 280), (9, 300), (1, 290), (1, 90)]
    plain = make_case(lengths, block_size=16, poison=0.0)
    case = with_shared_beginnings(plain, [0, 1, 0, 0, 1, 1], [16, 16, 16, 16, 10, 2])
    attend_cpp(case)  # skipped where there is no compiler
    assert cpu.spared_keys(case.q, case.k_cache, case.batch) == 16 * 16 + 10 * 16
    assert cpu.spared_keys(case.q, case.k_cache, case.batch, window=100) == 0, "a window may not see the beginning"
    assert cpu.spared_keys(plain.q, plain.k_cache, plain.batch) == 0


@DTYPES
def test_the_number_of_threads_changes_no_bit(attend_cpp, dtype):
    case = make_case([*LONG, (90, 700)], heads=6, kv_heads=3, dim=64, block_size=16, dtype=dtype)
    before = torch.get_num_threads()
    try:
        outs = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            outs.append(attend_cpp(case))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(outs[0], out) for out in outs[1:]), "the order of a sum depends on the number of threads"


@DTYPES
@pytest.mark.parametrize("size", [1, 7, 100, 300])
def test_a_token_has_the_same_bits_in_decode_chunk_and_prefill(attend_cpp, dtype, size):
    case = make_case([(300, 600)], heads=6, kv_heads=3, dim=40, block_size=16, dtype=dtype, padded_rows=0)
    whole = attend_cpp(case)
    for begin in (0, 7 * size % 300, 300 - size):
        chunk = attend_cpp(case.part(0, begin, begin + size))
        assert torch.equal(whole[begin : begin + size], chunk), f"a chunk of {size} at {begin} rounds differently"


@DTYPES
def test_the_block_size_changes_no_bit(attend_cpp, dtype):
    outs = []
    for block_size in (1, 7, 16, 256):
        case = make_case([(1, 600), (20, 50)], block_size=block_size, dtype=dtype, poison=0.0)
        outs.append(attend_cpp(case))
    assert all(torch.equal(outs[0], out) for out in outs[1:]), "the order of a sum depends on where blocks end"


@DTYPES
def test_queries_may_be_a_slice_of_a_wider_tensor(attend_fast, dtype):
    case = make_case(MIXED, dtype=dtype)
    wide = torch.cat([case.q, torch.full_like(case.q, NAN)], dim=1)
    sliced = replace(case, q=wide[:, : case.q.shape[1]])
    assert torch.equal(attend_fast(case), attend_fast(sliced)), "q may be strided, as a slice of a fused projection is"


# ---------------------------------------------------------------- bad inputs

GOOD = make_case([(1, 6), (2, 3)], padded_rows=0)
REFUSED = {
    "q [T, H_q, D]": dict(q=GOOD.q[0]),
    "[num_blocks, block_size, H_kv, D]": dict(v_cache=GOOD.v_cache[1:]),
    "head_dim 16 32": dict(q=GOOD.q[..., :16]),
    "3 2 heads": dict(q=GOOD.q[:, :3]),
    "torch.bfloat16 torch.float32": dict(q=GOOD.q.bfloat16()),
    "contiguous": dict(k_cache=GOOD.k_cache.mT.contiguous().mT),
    "cu_seqlens_q torch.int64 int32": dict(cu_seqlens_q=GOOD.cu_seqlens_q.long()),
    "seq_lens_kv torch.int64": dict(seq_lens_kv=GOOD.seq_lens_kv.long()),
    "block_table torch.int64": dict(block_table=GOOD.block_table.long()),
    "cu_seqlens_q [S + 1]": dict(cu_seqlens_q=int32([0, 3])),
    "block_table 2": dict(block_table=GOOD.block_table[:1]),
    "cu_seqlens_q 1 3": dict(cu_seqlens_q=int32([1, 2, 3])),
    "q 3 5": dict(cu_seqlens_q=int32([0, 1, 5])),
    "cu_seqlens_q 3 2 1": dict(cu_seqlens_q=int32([0, 3, 2])),
    "1 2": dict(seq_lens_kv=int32([6, 1])),
    "0 99 12 block_table": dict(seq_lens_kv=int32([99, 3])),
}


@pytest.mark.parametrize("values", REFUSED)
def test_bad_inputs_are_refused_in_one_clear_sentence(values):
    with refused(ValueError, values):
        load_kernel("reference")(*replace(GOOD, **REFUSED[values]).inputs)


def test_a_sequence_may_reach_to_the_end_of_its_row_of_the_table_and_no_further():
    *fits, _ = replace(GOOD, seq_lens_kv=int32([12, 3])).inputs  # rows of 3 blocks of 4 slots
    check_inputs(*fits)
    *too_long, _ = replace(GOOD, seq_lens_kv=int32([13, 3])).inputs
    with refused(ValueError, "13 12 block_table"):
        check_inputs(*too_long)


def test_an_unknown_kernel_is_refused_with_the_names_there_are():
    with refused(UserError, "'cuda' auto reference blockwise torch cpu triton"):
        load_kernel("cuda")


def test_a_kernel_that_cannot_work_here_says_why():
    with refused(UserError, "float32 bfloat16 torch.float16"):
        load_kernel("cpu", "cpu", torch.float16)
    with pytest.raises(UserError, match=r"[Tt]riton"):
        load_kernel("triton", "cpu")


@DTYPES
def test_a_kernel_loaded_for_one_dtype_is_right_for_another(dtype):
    """`load_kernel("cpu")` alone means float32; a float32 function would read past the end of bfloat16 tensors."""
    case = make_case(MIXED, dtype=dtype)
    try:
        kernels = [load_kernel("cpu", "cpu", other) for other in TOLERANCE]
    except UserError as why:
        pytest.skip(f"NOT CHECKED: the cpu kernel; {why}")
    for kernel in kernels:
        assert relative_error(kernel(*case.inputs), case.expected()) < TOLERANCE[dtype], "the dtype is q's own"


@pytest.mark.reference
def test_auto_on_a_cpu_says_once_where_it_settles_for_less(capfd):
    names = {load_kernel("auto", "cpu", torch.float16).name for _ in range(2)}
    assert names == {"torch"}, "the C++ kernel has no float16; torch does"
    assert capfd.readouterr().err.count("Using the torch kernel") == 1


@DTYPES
@pytest.mark.parametrize("lengths", [MIXED, [(1, 600)], [(40, 530)]], ids=str)
def test_the_vectorised_c_kernel_computes_what_the_scalar_one_does(lengths, dtype, request):
    case = make_case(lengths, heads=6, kv_heads=3, dim=40, block_size=16, dtype=dtype)
    scalar, fast = (attend_with(name, case, request) for name in ("scalar C++", "cpu"))
    assert relative_error(fast, scalar.double()) < TOLERANCE[dtype], "tiles, vectors and splits change only rounding"
