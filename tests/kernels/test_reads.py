"""Course machinery. What kernels read: queries as they lie in memory, blocks in place, and no block there is not."""

from dataclasses import replace

import pytest
import torch

from mini_engine.attention import blockwise
from mini_engine.attention.contract import EVERY_KEY, Batch
from mini_engine.latents import cpu as latent_cpu
from mini_engine.windows.kernels import visible_batch
from tests.kernels.cases import MIXED, NAN, int32, make_case
from tests.kernels.table import WINDOWED, Entry
from tests.shared.new_memory import NewMemory


def test_queries_may_lie_in_memory_as_a_product_left_them(kernel):
    """q may be a slice of a fused projection, einsum's transposed view, or, the worst, have numbers that lie apart."""
    case = kernel.case(MIXED)
    plain = kernel(case)
    ways = {
        "heads of a wider tensor": lambda q: torch.cat([q, torch.full_like(q, NAN)], dim=1)[:, : q.shape[1]],
        "the ends of wider heads": lambda q: torch.cat([torch.full_like(q, NAN), q], dim=2)[..., q.shape[2] :],
        "head by head": lambda q: q.transpose(0, 1).contiguous().transpose(0, 1),
        "number by number": lambda q: q.transpose(1, 2).contiguous().transpose(1, 2),
    }
    for way, view in ways.items():
        out = kernel(replace(case, queries=tuple(view(q) for q in case.queries)))
        torch.testing.assert_close(out, plain, msg=lambda m, way=way: f"q lies {way}. {m}")


@pytest.mark.parametrize("block", [-1, 10_000])
@pytest.mark.parametrize("q_len, key", [(1, 11), (4, 7)], ids=["decode", "chunk"])
def test_a_needed_block_that_does_not_exist_is_refused(quick, q_len, key, block):
    """A chunk's first query sees a block that the last one does not; reading it unchecked would end the process."""
    if quick.latents and block == -1 and quick.name in ("reference", "torch"):
        pytest.skip("torch takes block -1 for the last one")
    for window in quick.windows(EVERY_KEY, 2):
        case = quick.case([(1, 9), (q_len, 12)], window=window)
        table = case.batch.block_table.clone()
        table[1, key // 4] = block
        with pytest.raises((ValueError, IndexError), match=r"block|index"):
            quick(case.with_tables(block_table=table))


def test_a_refused_table_leaves_the_answer_unwritten():
    """The C++ function looks at every table before it writes: a caller may have given it memory in use."""
    kernel = Entry("cpu", latents=True)
    kernel.load()  # skipped where there is no compiler
    case = kernel.case([(1, 9), (1, 5)])
    table = case.batch.block_table.clone()
    table[1, 1] = 10_000
    out = torch.full_like(case.q, 7.0)
    function = latent_cpu.LIBRARY.function("latent_attention", torch.float32)
    pointers = [x.data_ptr() for x in (*case.queries, *case.caches, out, *case.batch[:2], table)]
    sizes = latent_cpu.sizes_of(*case.queries, case.caches[0], table)
    assert function(*pointers, sizes, case.scale, 2) == 1, "the sequence whose row of the table is wrong"
    assert (out == 7).all()


# ---------------------------------------------------------------- memory


def peaks(kernel, window, lengths):
    """Return the bytes that the kernel takes for each of these lengths."""
    found = []
    for kv_len in lengths:
        case = kernel.case([(1, kv_len), (4, kv_len)], window=window)
        attend = kernel.load(torch.float32, window)
        attend(*case.inputs)  # the matrix of a rotation is made once
        with NewMemory(*case.queries, *case.caches, *case.batch) as new:
            attend(*case.inputs)
        found.append(new.peak)
    return found


@pytest.mark.parametrize("latents", [False, True])
def test_the_blockwise_kernels_take_no_more_for_a_longer_history(latents):
    kernels = [Entry(name, latents=latents) for name in ("blockwise", "reference")]
    block_by_block, gathers = (peaks(kernel, EVERY_KEY, (64, 1024)) for kernel in kernels)
    assert len(set(block_by_block)) == 1, f"bytes for 64 and for 1,024 keys: {block_by_block}; something is kept"
    assert gathers[1] > 8 * gathers[0], "the reference gathers; if this does not show, nothing does"


@pytest.mark.parametrize("kernel", [kernel for kernel in WINDOWED if kernel.name != "cpu"], ids=str)
def test_memory_does_not_grow_with_what_is_behind_the_window(kernel):
    few, many = peaks(kernel, 30, (100, 1000))
    assert few == many, "bytes behind 100 and behind 1,000 tokens: only visible blocks are copied"


# ---------------------------------------------------------------- seams


def test_a_caller_may_watch_each_block():
    case, seen = make_case([(2, 9)]), []
    blocks = case.batch.block_table[0].tolist()
    q = case.q[case.rows[0]]
    out = blockwise.attend_blocks(q, *case.caches, blocks, 9, 0.5, lambda *kept: seen.append([x.clone() for x in kept]))
    assert [scores.shape[-1] for scores, *_ in seen] == [4, 4, 1], "the scores of each block's keys, in order"
    _, largest, total, sums = seen[-1]
    assert torch.equal((sums / total).flatten(1, 2), out), "what is left after the last block is the answer"
    assert torch.equal(largest[..., 0], torch.cat([scores for scores, *_ in seen], -1).amax(-1)), "over all blocks"


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
