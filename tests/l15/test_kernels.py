"""Lesson 15. Every kernel with a window gives what a dense mask gives, and reads no block behind the window."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.attention import cpu
from mini_engine.attention.contract import EVERY_KEY, Batch, Kernel
from mini_engine.attention.registry import load_kernel, windowed
from mini_engine.base.errors import UserError
from mini_engine.windows.kernels import visible_batch
from tests.l3.kernel_cases import int32, relative_error
from tests.l3.new_memory import NewMemory
from tests.l3.pickled import Worker
from tests.l15.windowed_cases import TOLERANCE, Windowed, check_crowd, crowd, crowds, windowed_case

pytestmark = pytest.mark.reference  # no task is about this


def mostly_nightly(*quick, nightly):
    """Return parameters of which the usual run of tests takes the quick ones."""
    return [*quick, *(pytest.param(value, marks=pytest.mark.nightly) for value in nightly)]


DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
PLAIN = ("reference", "blockwise", "torch", "cpu")
ON_GPU = ("triton on cuda", "torch on cuda") if torch.cuda.is_available() else ()
INTERPRETED = ("interpreted triton",)


@pytest.fixture(scope="module")
def interpreters():
    """A process in which Triton interprets its kernel."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("NOT CHECKED: the Triton kernel; Triton is not installed")
    worker = Worker("tests.l15.triton_worker")
    yield dict.fromkeys(INTERPRETED, worker)
    worker.close()


def load(name: str, dtype: torch.dtype) -> Kernel:
    """Return the kernel that `name` names, without a window yet."""
    name, _, device = name.partition(" on ")
    try:
        return load_kernel(name, device or "cpu", dtype)
    except UserError as why:
        pytest.skip(f"NOT CHECKED: the {name} kernel; {why}")


def attend_with(name, case, request):
    """Run the kernel of that name and return its answer on the CPU."""
    if name in INTERPRETED:
        return request.getfixturevalue("interpreters")[name](case.window, *case.inputs)
    return windowed(load(name, case.case.q.dtype), case.window)(*inputs_for(name, case)).cpu()


def inputs_for(name: str, case: Windowed) -> tuple:
    """Return the case's inputs on the device that the kernel's name says."""
    device = name.partition(" on ")[2] or "cpu"
    return case.case.on(device)


@pytest.fixture(params=(*PLAIN, *INTERPRETED, *ON_GPU))
def kernel(request):
    return request.param


@pytest.fixture(params=PLAIN)
def fast_kernel(request):
    return request.param


def check(name, case, request, teach, entry=0):
    """Compare with the oracle, once the blocks behind the windows are NaN and their table entries are `entry`."""
    holes = case.with_holes(entry, fill=float("nan"))
    out = attend_with(name, holes, request)
    assert out.shape == case.case.q.shape and out.dtype == case.case.q.dtype, "the answer has q's shape and dtype"
    assert not out.isnan().any(), f"{teach}: NaN from behind the window, or from a row that sees no key of a tile"
    error = relative_error(out, case.expected())
    assert error < TOLERANCE[out.dtype], f"{teach}: relative error {error:.2g} against a dense mask in float64"


MIXED = [(1, 9), (4, 4), (3, 8), (1, 1), (0, 5), (5, 14), (1, 70), (20, 75)]  # (q_len, kv_len)


@DTYPES
@pytest.mark.parametrize("window", mostly_nightly(3, 17, nightly=(2, 15, 16, 64, 200)))
def test_a_mixed_batch_gives_what_a_dense_mask_gives(kernel, window, dtype, request):
    check(kernel, windowed_case(MIXED, window, block_size=16, dtype=dtype), request, f"a window of {window}")


SHAPES = {
    "blocks of 1": dict(heads=2, kv_heads=2, dim=64, block_size=1),
    "five queries a key head, dim 48, blocks of 7": dict(heads=15, kv_heads=3, dim=48, block_size=7),
    "sixteen queries a key head, dim 80": dict(heads=16, kv_heads=1, dim=80, block_size=4),
    "dim 18, which fills no vector": dict(heads=4, kv_heads=2, dim=18, block_size=3),
    "a block longer than any history": dict(heads=6, kv_heads=2, dim=40, block_size=256),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_heads_and_blocks_of_any_size(kernel, shape, request):
    check(kernel, windowed_case(MIXED, 6, **SHAPES[shape]), request, shape)


@DTYPES
@pytest.mark.parametrize("window", mostly_nightly(513, nightly=(2, 100, 511, 512, 700)))
@pytest.mark.parametrize("lengths", [[(1, 1300), (1, 3)], [(40, 600)], [(530, 530)], [(70, 1100), (1, 1025)]], ids=str)
def test_long_histories_give_what_a_dense_mask_gives(fast_kernel, lengths, window, dtype, request):
    case = windowed_case(lengths, window, dim=64, block_size=16, dtype=dtype)
    check(fast_kernel, case, request, f"(q_len, kv_len) {lengths}, a window of {window}")


@pytest.mark.parametrize("window", mostly_nightly(300, nightly=(40, 520)))
@pytest.mark.parametrize("name", INTERPRETED)
def test_the_visible_part_of_a_decode_is_split_and_merged(name, window, request):
    for lengths in ([(1, 9000), (1, 3)], [(3, 340), (1, 800), (0, 0), (1, 301)]):
        case = windowed_case(lengths, window, heads=2, kv_heads=1, block_size=16)
        check(name, case, request, f"(q_len, kv_len) {lengths}, a window of {window}")


@pytest.mark.parametrize("entry", mostly_nightly(10**6, nightly=(-1, 2**31 - 1)))
def test_a_table_entry_behind_the_window_is_never_followed(kernel, entry, request):
    for window in (3, 33):
        case = windowed_case(MIXED, window, block_size=4)
        check(kernel, case, request, f"entries behind a window of {window} are {entry}", entry)


@pytest.mark.parametrize("fill", mostly_nightly(float("nan"), nightly=(float("inf"), 1.0)))
def test_no_block_behind_the_window_is_read(kernel, fill, request):
    """Work does not grow with what lies there: a kernel that read it and masked it would answer NaN."""
    case = windowed_case([(1, 90), (7, 60)], 9, block_size=4)
    holes = case.with_holes(int(case.case.block_table[0, 0]), fill)  # it still says whose the block was
    assert torch.equal(attend_with(kernel, case, request), attend_with(kernel, holes, request))


@pytest.mark.parametrize("name", ["reference", "blockwise", "torch"])
def test_memory_does_not_grow_with_what_is_behind_the_window(name):
    peaks = []
    for kv_len in (100, 1000):
        case = windowed_case([(1, kv_len), (4, kv_len)], 30, block_size=4)
        attend, inputs = windowed(load(name, torch.float32), 30), case.inputs
        with NewMemory(*case.case.tensors) as new:
            attend(*inputs)
        peaks.append(new.peak)
    assert peaks[1] == peaks[0], f"bytes behind 100 and behind 1,000 tokens: {peaks}; only visible blocks are copied"


def test_every_key_from_the_last_visible_one_on_counts(kernel, request):
    """Position 8 with a window of 3 sees the keys 6, 7 and 8; each of the others may change."""
    case = windowed_case([(1, 9), (2, 9)], 3, block_size=4)
    for key, seen in ((5, [False, True, False]), (6, [True, True, True])):
        changed = replace(case, case=replace(case.case, v_cache=case.case.v_cache.clone()))
        for row in case.case.block_table:
            changed.case.v_cache[int(row[key // 4]), key % 4] += 1
        before, after = (attend_with(kernel, x, request) for x in (case, changed))
        differs = [not torch.equal(before[row], after[row]) for row in range(3)]
        assert differs == seen, f"positions 8, 7 and 8 with a window of 3, when key {key} changes"


@DTYPES
@pytest.mark.parametrize("window", [75, EVERY_KEY])
def test_a_window_that_hides_nothing_changes_no_bit(kernel, window, dtype, request):
    case = windowed_case(MIXED, window, block_size=4, dtype=dtype)
    if kernel in INTERPRETED:
        plain = request.getfixturevalue("interpreters")[kernel](EVERY_KEY, *case.inputs)
    else:
        plain = load(kernel, dtype)(*inputs_for(kernel, case)).cpu()
    assert torch.equal(attend_with(kernel, case, request), plain), "lesson 3's kernel, to the bit"


@st.composite
def cases(draw):
    group, kv_heads = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    kv_lens = draw(st.lists(st.integers(1, 150), min_size=1, max_size=4))
    return windowed_case(
        [(draw(st.one_of(st.just(1), st.integers(0, kv_len))), kv_len) for kv_len in kv_lens],
        draw(st.one_of(st.integers(1, 20), st.integers(1, 160))),
        heads=group * kv_heads,
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([8, 16, 18, 32, 48, 64, 80, 128])),
        block_size=draw(st.integers(1, 20)),
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        padding=draw(st.sampled_from([0, -1, 2**31 - 1])),
        padded_rows=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("name", PLAIN)
def test_any_batch_with_any_window_gives_what_a_dense_mask_gives(name, request):
    @settings(max_examples=30)
    @given(case=cases(), entry=st.sampled_from([0, -1, 10**6]))
    def holds(case, entry):
        check(name, case, request, str(case), entry)

    holds()


# ---------------------------------------------------------------- a crowd: what is read once for many changes nothing


@pytest.mark.parametrize("name", PLAIN)
def test_a_crowd_that_shares_gives_what_a_dense_mask_gives(name, request):
    @settings(max_examples=25 if name == "cpu" else 8)
    @given(case=crowds())
    def holds(case):
        check_crowd(case, lambda one: attend_with(name, one, request), name == "cpu")

    holds()


@DTYPES
@pytest.mark.parametrize("window", [110, 128, EVERY_KEY])
@pytest.mark.parametrize("name", mostly_nightly(*PLAIN, *ON_GPU, nightly=INTERPRETED))
def test_a_crowd_behind_96_shared_keys(name, window, dtype, request):
    """In C++ the shared keys are read once for all of them: every query sees each, wherever it stands in the crowd."""
    case = crowd(100, 96, window, seed=1, block_size=16, heads=4, kv_heads=2, dim=16, dtype=dtype)
    check_crowd(case, lambda one: attend_with(name, one, request), name == "cpu")


@pytest.mark.nightly
@pytest.mark.parametrize("name", PLAIN)
def test_any_of_many_crowds_gives_what_a_dense_mask_gives(name, request):
    @settings(max_examples=400)
    @given(case=crowds())
    def holds(case):
        check_crowd(case, lambda one: attend_with(name, one, request), name == "cpu")

    holds()


# ---------------------------------------------------------------- C++: the same bits in any batch

LONG = [(1, kv_len) for kv_len in (1, 16, 511, 513, 1100, 1537)]


@pytest.fixture
def attend_cpp(request):
    return lambda case: attend_with("cpu", case, request)


@DTYPES
@pytest.mark.parametrize("window", [7, 100, 512, 600])
def test_batch_and_threads_change_no_bit(attend_cpp, window, dtype):
    case = windowed_case([*LONG, (90, 700)], window, heads=6, kv_heads=3, dim=64, block_size=16, dtype=dtype)
    before, outs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            outs.append(attend_cpp(case))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(outs[0], out) for out in outs[1:]), "the order of a sum depends on the number of threads"
    for s, rows in enumerate(case.case.rows):
        alone = attend_cpp(case.alone(s))
        assert torch.equal(outs[0][rows], alone), f"sequence {s} depends on its batch"


@DTYPES
@pytest.mark.parametrize("window", [7, 100, 512])
def test_a_token_has_the_same_bits_in_decode_chunk_and_prefill(attend_cpp, window, dtype):
    shape = dict(heads=6, kv_heads=3, dim=40, block_size=16, dtype=dtype, padded_rows=0)
    case = windowed_case([(300, 800)], window, **shape)
    whole = attend_cpp(case)
    for size in (1, 7, 100):
        for begin in (0, 7 * size % 300, 300 - size):
            chunk = attend_cpp(replace(case, case=case.case.part(0, begin, begin + size)))
            assert torch.equal(whole[begin : begin + size], chunk), f"a chunk of {size} at {begin} rounds differently"


@DTYPES
@pytest.mark.parametrize("window", [7, 100])
def test_the_block_size_changes_no_bit(window, dtype, request):
    sizes = (1, 7, 16, 256)
    cases = [windowed_case([(1, 600), (20, 50)], window, block_size=size, dtype=dtype, poison=0.0) for size in sizes]
    outs = [attend_with("cpu", case.with_holes(-1), request) for case in cases]
    assert all(torch.equal(outs[0], out) for out in outs[1:]), "the order of a sum depends on where blocks end"


@DTYPES
@pytest.mark.parametrize("window", [2, 17, 520])
def test_the_scalar_kernel_gives_what_a_dense_mask_gives(window, dtype):
    case = windowed_case([*MIXED, (1, 600)], window, block_size=4, dtype=dtype).with_holes(-1)
    out = cpu.scalar_attention(*case.inputs, window=window)
    assert relative_error(out, case.expected()) < TOLERANCE[dtype], "read scalar.h first; it has to be right"


# ---------------------------------------------------------------- what windowed returns and refuses


@pytest.mark.parametrize("block", [-1, 10_000])
@pytest.mark.parametrize("q_len, visible", [(1, 11), (4, 7)], ids=["decode", "chunk"])
def test_a_visible_block_that_does_not_exist_is_refused(fast_kernel, q_len, visible, block, request):
    """A chunk's first query sees a block that the last one does not; reading it unchecked would end the process."""
    case = windowed_case([(1, 9), (q_len, 12)], 2, block_size=4)
    case.case.block_table[1, visible // 4] = block
    with pytest.raises((ValueError, IndexError), match=r"block|index"):
        attend_with(fast_kernel, case, request)


@pytest.mark.parametrize("name", PLAIN)
def test_a_kernel_keeps_its_name_and_what_it_checks(name):
    plain = load(name, torch.float32)
    got = windowed(plain, 4)
    assert got.name == plain.name and type(got) is type(plain)
    q, k_cache, *rest = windowed_case([(1, 9)], 4).inputs
    with pytest.raises(ValueError, match="cache"):
        got(q, k_cache.to(torch.int8), *rest)


def test_an_unknown_kernel_and_an_empty_window_are_refused():
    with pytest.raises(UserError, match="the attention kernel 'mine' has no windowed form"):
        windowed(Kernel("mine", cpu.scalar_attention), 4)
    with pytest.raises(ValueError, match="the window is 0 keys"):
        windowed(load("reference", torch.float32), 0)


def test_tables_begin_at_the_first_visible_block():
    table = int32([[10, 11, 12, 13, 14, -1], [20, 21, -1, -1, -1, -1], [0, 0, 0, 0, 0, 0]])
    starts, kv_lens, rows = visible_batch(Batch(int32([0, 1, 4, 4]), int32([18, 7, 0]), table), 4, 3)
    assert starts.tolist() == [0, 1, 4], "the sequence without queries is left out"
    assert kv_lens.tolist() == [6, 7], "position 17 sees keys 15 … 17: three blocks of 4 are behind; position 4 sees 2"
    assert rows.tolist() == [[13, 14], [20, 21]], "nothing past the longest visible history is needed"


def test_a_long_chunk_is_cut_so_that_later_queries_skip_more():
    table = torch.arange(100, 164, dtype=torch.int32)[None]
    starts, kv_lens, rows = visible_batch(Batch(int32([0, 300]), int32([300]), table), 16, 20)
    assert starts.tolist() == [0, 128, 256, 300]
    assert kv_lens.tolist() == [128, 256 - 6 * 16, 300 - 14 * 16], "queries 128 and 256 see keys from 109 and 237 on"
    assert rows[:, 0].tolist() == [100, 106, 114]
