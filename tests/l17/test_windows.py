"""Lesson 17. Kernels over rows with lesson 15's window: a dense mask's answers, and nothing read behind the window."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.attention.contract import EVERY_KEY
from mini_engine.attention.reference import gather
from mini_engine.attention.registry import load_kernel, windowed
from mini_engine.base.errors import UserError
from mini_engine.quantized.formats import FORMATS
from tests.l3.kernel_cases import relative_error
from tests.l3.new_memory import NewMemory
from tests.l3.pickled import Worker
from tests.l15 import windowed_cases
from tests.l15.windowed_cases import TOLERANCE, Windowed, crowd, crowds, windowed_case

pytestmark = pytest.mark.reference  # no task is about this

DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
IN_TORCH = [f"{rows} {name}" for rows in FORMATS for name in ("reference", "torch")]
IN_PROCESS = [*IN_TORCH, *(f"{rows} cpu" for rows in FORMATS)]
INTERPRETED = [f"{rows} triton" for rows in FORMATS]
MIXED = [(1, 9), (4, 4), (3, 8), (1, 1), (0, 5), (5, 14), (1, 70), (20, 75)]  # (q_len, kv_len)
A_FAULT = {"int8": -1, "int4": 255}  # bytes of these: a scale, or a step, that is NaN


@pytest.fixture(scope="module")
def interpreter():
    """A process in which Triton interprets its kernels."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("NOT CHECKED: the Triton kernels; Triton is not installed")
    worker = Worker("tests.l17.triton_worker")
    yield worker
    worker.close()


@pytest.fixture(params=(*IN_PROCESS, *INTERPRETED))
def kernel(request):
    return request.param


@pytest.fixture(params=[f"{rows} cpu" for rows in FORMATS])
def cpp(request):
    return request.param


def load(kernel, dtype):
    rows, _, name = kernel.partition(" ")
    try:
        return load_kernel(name, "cpu", dtype, rows)
    except UserError as why:
        pytest.skip(f"NOT CHECKED: the {kernel} kernel; {why}")


def of_rows(kernel, case: Windowed) -> Windowed:
    """Return the case with a cache of the rows that the kernel reads, and what these stand for as its histories."""
    rows, plain = FORMATS[kernel.partition(" ")[0]], case.case
    k, v = rows.write(plain.k_cache), rows.write(plain.v_cache)
    tables, dim = zip(plain.block_table, plain.seq_lens_kv.tolist(), strict=True), plain.q.shape[2]
    histories = [tuple(rows.read(gather(x, row, n), dim, torch.float32) for x in (k, v)) for row, n in tables]
    return replace(case, case=replace(plain, k_cache=k, v_cache=v, histories=histories))


def attend_with(kernel, case, request, window=None):
    """Run the kernel of that name and return its answer."""
    rows, _, name = kernel.partition(" ")
    window = case.window if window is None else window
    if name == "triton":
        return request.getfixturevalue("interpreter")(rows, window, *case.inputs)
    return windowed(load(kernel, case.case.q.dtype), window)(*case.inputs)


def holed(kernel, case, entry=0):
    return case.with_holes(entry, fill=A_FAULT[kernel.partition(" ")[0]])


def check(kernel, case, request, teach, entry=0):
    """Compare with the oracle, once the rows behind the windows are faults and their table entries are `entry`."""
    case = of_rows(kernel, case)
    out = attend_with(kernel, holed(kernel, case, entry), request)
    assert out.shape == case.case.q.shape and out.dtype == case.case.q.dtype, "the answer has q's shape and dtype"
    assert not out.isnan().any(), f"{teach}: NaN from behind the window, or from a row that sees no key of a tile"
    error = relative_error(out, case.expected())
    assert error < TOLERANCE[out.dtype], f"{teach}: relative error {error:.2g} against a dense mask in float64"


@DTYPES
@pytest.mark.parametrize("window", [3, 17])
def test_a_mixed_batch_gives_what_a_dense_mask_gives(kernel, window, dtype, request):
    check(kernel, windowed_case(MIXED, window, block_size=16, dtype=dtype), request, f"a window of {window}")


SHAPES = {
    "blocks of 1": dict(heads=2, kv_heads=2, dim=64, block_size=1),
    "five queries a key head, dim 48, blocks of 7": dict(heads=15, kv_heads=3, dim=48, block_size=7),
    "dim 18, whose rows are padded": dict(heads=4, kv_heads=2, dim=18, block_size=3),
    "dim 128": dict(heads=4, kv_heads=2, dim=128, block_size=16),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_heads_and_blocks_of_any_size(kernel, shape, request):
    check(kernel, windowed_case(MIXED, 6, **SHAPES[shape]), request, shape)


@DTYPES
@pytest.mark.parametrize("lengths", [[(1, 1300), (1, 3)], [(40, 600)], [(70, 1100), (1, 1025)]], ids=str)
@pytest.mark.parametrize("name", IN_PROCESS)
def test_long_histories_give_what_a_dense_mask_gives(name, lengths, dtype, request):
    check(name, windowed_case(lengths, 513, dim=64, block_size=16, dtype=dtype), request, f"{lengths}, window 513")


@pytest.mark.parametrize("name", INTERPRETED)
def test_the_visible_part_of_a_decode_is_split_and_merged(name, request):
    case = windowed_case([(3, 340), (1, 800), (0, 0), (1, 301)], 300, heads=2, kv_heads=1, block_size=16)
    check(name, case, request, "a window of 300")


def test_a_table_entry_behind_the_window_is_never_followed(kernel, request):
    for window in (3, 33):
        case = windowed_case(MIXED, window, block_size=4)
        check(kernel, case, request, f"entries behind a window of {window}", 10**6)


def test_no_block_behind_the_window_is_read(kernel, request):
    case = of_rows(kernel, windowed_case([(1, 90), (7, 60)], 9, block_size=4))
    holes = holed(kernel, case, int(case.case.block_table[0, 0]))  # the table still says whose the block was
    assert torch.equal(attend_with(kernel, case, request), attend_with(kernel, holes, request))


@pytest.mark.parametrize("name", IN_TORCH)
def test_memory_does_not_grow_with_what_is_behind_the_window(name):
    peaks = []
    for kv_len in (100, 1000):
        case = of_rows(name, windowed_case([(1, kv_len), (4, kv_len)], 30, block_size=4))
        attend, inputs = windowed(load(name, torch.float32), 30), case.inputs
        attend(*inputs)  # the matrix of a rotation is made once
        with NewMemory(*case.case.tensors) as new:
            attend(*inputs)
        peaks.append(new.peak)
    assert peaks[1] == peaks[0], f"bytes behind 100 and behind 1,000 tokens: {peaks}; only visible blocks are copied"


@DTYPES
@pytest.mark.parametrize("window", [75, EVERY_KEY])
def test_a_window_that_hides_nothing_changes_no_bit(kernel, window, dtype, request):
    case = of_rows(kernel, windowed_case(MIXED, window, block_size=4, dtype=dtype))
    plain = (
        attend_with(kernel, case, request, EVERY_KEY) if kernel in INTERPRETED else load(kernel, dtype)(*case.inputs)
    )
    assert torch.equal(attend_with(kernel, case, request), plain), "the kernel without a window, to the bit"


@pytest.mark.parametrize("name", IN_PROCESS)
def test_any_batch_with_any_window_gives_what_a_dense_mask_gives(name, request):
    @st.composite
    def cases(draw):
        group, kv_heads = draw(st.integers(1, 9)), draw(st.integers(1, 3))
        kv_lens = draw(st.lists(st.integers(1, 150), min_size=1, max_size=4))
        return windowed_case(
            [(draw(st.one_of(st.just(1), st.integers(0, kv_len))), kv_len) for kv_len in kv_lens],
            draw(st.integers(1, 160)),
            heads=group * kv_heads,
            kv_heads=kv_heads,
            dim=draw(st.sampled_from([8, 16, 18, 32, 48, 64, 80, 128])),
            block_size=draw(st.integers(1, 20)),
            dtype=draw(st.sampled_from(list(TOLERANCE))),
            padded_rows=draw(st.integers(1, 3)),
            seed=draw(st.integers(0, 99)),
        )

    @settings(max_examples=20, deadline=None)
    @given(case=cases(), entry=st.sampled_from([0, -1, 10**6]))
    def holds(case, entry):
        check(name, case, request, str(case), entry)

    holds()


def check_crowd(name, case, request):
    """Compare a crowd over this kernel's rows; in C++, the bits of each sequence alone, too."""
    windowed_cases.check_crowd(of_rows(name, case), lambda one: attend_with(name, one, request), name.endswith("cpu"))


@DTYPES
@pytest.mark.parametrize("window", [110, 128, EVERY_KEY])
@pytest.mark.parametrize("name", IN_PROCESS)
def test_a_crowd_behind_96_shared_keys(name, window, dtype, request):
    case = crowd(100, 96, window, seed=1, block_size=16, heads=4, kv_heads=2, dim=16, dtype=dtype)
    check_crowd(name, case, request)


@pytest.mark.nightly
@pytest.mark.parametrize("name", IN_PROCESS)
def test_any_of_many_crowds_gives_what_a_dense_mask_gives(name, request):
    @settings(max_examples=100)
    @given(case=crowds())
    def holds(case):
        check_crowd(name, case, request)

    holds()


@DTYPES
def test_batch_and_threads_change_no_bit(cpp, dtype, request):
    lengths = [(1, kv_len) for kv_len in (1, 16, 513, 1100)] + [(90, 700)]
    case = of_rows(cpp, windowed_case(lengths, 100, heads=6, kv_heads=3, dim=64, block_size=16, dtype=dtype))
    before, outs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            outs.append(attend_with(cpp, case, request))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(outs[0], out) for out in outs[1:]), "the order of a sum depends on the number of threads"


@pytest.mark.parametrize("block", [-1, 10_000])
@pytest.mark.parametrize("q_len, visible", [(1, 11), (4, 7)], ids=["decode", "chunk"])
@pytest.mark.parametrize("name", IN_PROCESS)
def test_a_visible_block_that_does_not_exist_is_refused(name, q_len, visible, block, request):
    case = of_rows(name, windowed_case([(1, 9), (q_len, 12)], 2, block_size=4))
    case.case.block_table[1, visible // 4] = block
    with pytest.raises((ValueError, IndexError), match=r"block|index"):
        attend_with(name, case, request)


@pytest.mark.parametrize("name", IN_PROCESS)
def test_a_kernel_keeps_its_name_and_what_it_checks(name):
    plain = load(name, torch.float32)
    got = windowed(plain, 4)
    assert got.name == plain.name and type(got) is type(plain)
    with pytest.raises(ValueError, match="cache"):
        got(*windowed_case([(1, 9)], 4).inputs)
