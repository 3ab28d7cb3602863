"""Course machinery. The C++ kernels round a token alike in every batch, chunk, block size and number of threads."""

from dataclasses import replace

import pytest
import torch

from mini_engine.attention import cpu
from mini_engine.attention.contract import EVERY_KEY
from tests.kernels.table import Entry

SHAPE = dict(heads=6, kv_heads=3, rope=10, block_size=16)
LENGTHS = [*((1, kv_len) for kv_len in (1, 15, 16, 17, 31, 33, 511, 512, 513, 1100, 1537)), (90, 700)]


@pytest.fixture(params=[40, 128], ids="{} numbers".format)
def dim(request):
    """A head's numbers: the codes of 128 are multiplied as they lie in the cache, others are widened."""
    return request.param


def test_neither_the_batch_nor_the_number_of_threads_matters(cpp, dtype, dim):
    before = torch.get_num_threads()
    for window in cpp.windows(EVERY_KEY, 7, 100, 512, 600):
        case, outs = cpp.case(LENGTHS, window=window, dtype=dtype, dim=dim, **SHAPE), []
        try:
            for threads in (1, 2, 3, 7, 40):
                torch.set_num_threads(threads)
                outs.append(cpp(case))
        finally:
            torch.set_num_threads(before)
        same = all(torch.equal(outs[0], out) for out in outs[1:])
        assert same, f"the order of a sum depends on the number of threads, window {window}"
        for s, rows in enumerate(case.rows):
            assert torch.equal(outs[0][rows], cpp(case.part(s))), f"{LENGTHS[s]} depends on its batch, window {window}"


def test_a_token_rounds_alike_in_decode_chunk_and_prefill(cpp, dtype, dim):
    for window in cpp.windows(EVERY_KEY, 7, 100, 512):
        case = cpp.case([(300, 800)], window=window, dtype=dtype, padded_rows=0, dim=dim, **SHAPE)
        whole = cpp(case)
        for size in (1, 7, 100, 300):
            for begin in {0, 7 * size % 300 if size < 300 else 0, 300 - size}:
                chunk = cpp(case.part(0, begin, begin + size))
                assert torch.equal(whole[begin : begin + size], chunk), f"{size} queries at {begin}, window {window}"


def test_the_block_size_does_not_matter(cpp, dtype, dim):
    for window in cpp.windows(EVERY_KEY, 7, 100):
        shape = SHAPE | dict(window=window, dtype=dtype, dim=dim, poison=0.0)
        sizes = [shape | dict(block_size=size) for size in (1, 7, 16, 256)]
        outs = [cpp(cpp.case([(1, 600), (20, 50)], **options)) for options in sizes]
        assert all(torch.equal(outs[0], out) for out in outs[1:]), "the order of a sum depends on where blocks end"


def test_the_number_of_heads_does_not_matter(cpp):
    case = cpp.case([(1, 600), (5, 40)], heads=37, kv_heads=1, padded_rows=0)
    whole = cpp(case)
    for heads in (1, 8, 9, 17):
        some = cpp(replace(case, queries=tuple(q[:, :heads] for q in case.queries)))
        assert torch.equal(some, whole[:, :heads]), f"{heads} heads alone round differently"


@pytest.mark.parametrize("shared", [80, 512, 700])
def test_a_run_may_fill_several_tiles_and_several_stretches(cpp, dtype, dim, shared):
    lengths = [(1, shared + more) for more in (1, 3, 16, 40, 400, 530)]
    options = dict(heads=32, kv_heads=1, dim=dim, block_size=16, dtype=dtype, shared=((0, shared // 16),) * 6)
    case = cpp.case(lengths, **options)
    out = cpp(case)
    for s, rows in enumerate(case.rows):
        assert torch.equal(out[rows], cpp(case.part(s))), f"sequence {s} of six that share {shared} keys"


def test_shared_keys_are_read_once_per_run():
    """Two system prompts, interleaved; one chat that prefills; one whose beginning is too short to be worth a run."""
    kernel, lengths = Entry("cpu"), [(1, 300), (1, 333), (1, 280), (9, 300), (1, 290), (1, 90)]
    kernel.load()  # skipped where there is no compiler
    shared = ((0, 16), (1, 16), (0, 16), (0, 16), (1, 10), (1, 2))
    case, plain = (kernel.case(lengths, block_size=16, shared=some) for some in (shared, None))
    assert cpu.spared_keys(case.q, case.caches[0], case.batch) == 16 * 16 + 10 * 16
    assert cpu.spared_keys(case.q, case.caches[0], case.batch, window=100) == 0, "a window may not see the beginning"
    assert cpu.spared_keys(plain.q, plain.caches[0], plain.batch) == 0


@pytest.mark.nightly
def test_triton_splits_a_decode_by_its_own_length_alone(triton):
    case = triton.case([(1, 700), (1, 1500), (1, 3)], heads=2, kv_heads=1, block_size=16, padded_rows=0)
    together = triton(case)
    for s in range(3):
        alone = case.part(s)
        fewer = alone.batch.block_table[:, : int(alone.batch.seq_lens_kv[0]) // 16 + 1]
        assert torch.equal(together[s], triton(alone.with_tables(block_table=fewer))[0]), "its bits depend on the batch"
