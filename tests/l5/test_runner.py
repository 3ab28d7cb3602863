"""Lesson 5. The runner: a step's plan, equal to lesson 3's, and the rows that need logits."""

import random
import sys
from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.engine.runner import ModelRunner, plan_step
from mini_engine.engine.scheduler import Chunk
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.block_table import BlockTable
from mini_engine.kv.block_tensor import PackedRequest, plan_packed
from tests.l5.helpers import request_of

CPU = torch.device("cpu")


def chunk(prompt_len, start, stop, blocks):
    return Chunk(request_of(prompt_len), start, stop, array("i", blocks))


MIXED = [
    chunk(3, 0, 3, [5]),  # a whole prompt
    chunk(5, 4, 5, [2, 7]),  # a decode
    chunk(9, 2, 6, [3, 1]),  # a chunk that ends in mid-prompt
]


@pytest.mark.task(6)
def test_prefills_chunks_and_decodes_share_one_plan():
    meta = plan_step(MIXED, 4, CPU).meta
    assert meta.cu_seqlens_q.tolist() == [0, 3, 4, 8], "3 tokens of a prompt, 1 of a decode, 4 of a chunk"
    assert meta.positions.tolist() == [0, 1, 2, 4, 2, 3, 4, 5], (
        "positions count from the request's start, not the chunk's"
    )
    assert meta.slot_mapping.tolist() == [20, 21, 22, 28, 14, 15, 4, 5], "slot = block * 4 + offset"
    assert meta.seq_lens_kv.tolist() == [3, 5, 6], (
        "a chunk sees itself and everything before it, not the rest of its prompt"
    )
    assert meta.block_table.tolist() == [[5, 0], [2, 7], [3, 1]], "short rows are padded with the null block"
    assert meta.block_size == 4


@pytest.mark.task(6)
def test_the_tokens_fed_are_those_of_the_chunks():
    assert plan_step(MIXED, 4, CPU).token_ids.tolist() == [1, 2, 3, 5, 3, 4, 5, 6], (
        "chunk after chunk, tokens start … stop - 1 of its request; the prompts here are 1, 2, 3, …"
    )


@pytest.mark.task(6)
def test_logits_are_computed_for_the_last_row_of_each_chunk_that_samples():
    assert plan_step(MIXED, 4, CPU).rows.tolist() == [2, 3], "the third chunk ends in mid-prompt and samples no token"
    assert plan_step(MIXED[2:], 4, CPU).rows.tolist() == [], "no chunk of this step samples"


@pytest.mark.task(6)
def test_kernel_tables_are_int32_and_torch_indices_int64():
    step = plan_step(MIXED, 4, CPU)
    meta = step.meta
    for name in ("cu_seqlens_q", "seq_lens_kv", "block_table"):
        assert getattr(meta, name).dtype == torch.int32, f"{name} is {getattr(meta, name).dtype}; kernels read int32"
    for name, tensor in (
        ("positions", meta.positions),
        ("slot_mapping", meta.slot_mapping),
        ("token_ids", step.token_ids),
        ("rows", step.rows),
        ("rows, of a step that samples nothing,", plan_step(MIXED[2:], 4, CPU).rows),
    ):
        assert tensor.dtype == torch.int64, f"{name} is {tensor.dtype}; torch indexes with int64"


@pytest.mark.task(6)
def test_blocks_beyond_a_chunk_are_in_the_table_but_not_in_the_slots():
    meta = plan_step([chunk(30, 4, 6, [9, 8, 7, 6])], 4, CPU).meta
    assert meta.block_table.tolist() == [[9, 8, 7, 6]], "the table lists all blocks of the chunk's request"
    assert meta.slot_mapping.tolist() == [32, 33], (
        "tokens 4 and 5 are in the second block, 8: slots 8 * 4 and 8 * 4 + 1"
    )


@pytest.mark.task(6)
def test_every_tensor_is_on_the_device():
    plan_step(MIXED, 4, CPU)
    meta = torch.device("meta")  # a device without memory, which every machine has
    try:
        step = plan_step(MIXED, 4, meta)
    except (RuntimeError, NotImplementedError):  # it computes on the device, where these numbers cannot be read
        return
    tensors = {"token_ids": step.token_ids, "rows": step.rows} | vars(step.meta)
    astray = sorted(name for name, x in tensors.items() if isinstance(x, torch.Tensor) and x.device != meta)
    assert astray == [], (
        f"{', '.join(astray)} stayed on the CPU: put every tensor on `device`, where the model reads them"
    )


def python_steps(function):
    """Return how many bytecode instructions Python executes in a call. Work done by torch is not among them."""
    count, before = 0, sys.gettrace()

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.task(6)
def test_python_loops_over_chunks_and_blocks_not_over_tokens():
    few, many = ([chunk(length, 0, length, range(1, 9))] for length in (8, 808))
    plan_step(few, 101, CPU)
    more = python_steps(lambda: plan_step(many, 101, CPU)) - python_steps(lambda: plan_step(few, 101, CPU))
    assert more < 400, (
        f"a chunk of 808 tokens takes {more} Python instructions more than one of 8: something loops over tokens in "
        "Python. A step has thousands of tokens: join slices of token_ids, and add the positions of a chunk and the "
        "slots of a block in one call each"
    )


@pytest.mark.task(6)
@settings(max_examples=30)
@given(
    size=st.integers(1, 9),
    spans=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=9),
    seed=st.integers(0, 99),
)
def test_the_plan_equals_lesson_3_s(size, spans, seed):
    allocator = BlockAllocator(800, size)
    random.Random(seed).shuffle(allocator.free_blocks)
    simple, chunks = [], []
    for start, count in spans:
        table = BlockTable(allocator)
        table.append(start + count)
        simple.append(PackedRequest(list(range(1, start + count + 1)), table, cur_len=start))
        chunks.append(chunk(start + count, start, start + count, table.blocks))
    want, got = plan_packed(simple, size, CPU), plan_step(chunks, size, CPU).meta
    for name, tensor in vars(want).items():
        mine = getattr(got, name)
        equal = mine == tensor if name == "block_size" else torch.equal(mine, tensor)
        assert equal, f"{name} differs from lesson 3's plan for chunks (start, count) {spans}, blocks of {size}"


class Echo:
    """A model that returns its arguments."""

    def __call__(self, token_ids, kv, meta, rows=None):
        return token_ids, kv, meta, rows


def test_the_model_is_called_with_the_plan_and_never_sees_a_request():
    pool = type("Pool", (), {"K": [torch.zeros(10, 4, 1, 2)], "device": CPU})()
    token_ids, kv, meta, rows = ModelRunner(Echo(), pool).run(MIXED)
    assert kv is pool and token_ids.shape == meta.positions.shape == (8,) and rows.tolist() == [2, 3]
