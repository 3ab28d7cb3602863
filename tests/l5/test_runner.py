"""Lesson 5. The runner: a step's plan, equal to lesson 3's, and the rows that need logits."""

import random
from array import array

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.engine.runner import ModelRunner, plan_step
from mini_engine.engine.scheduler import Chunk
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.block_table import BlockTable
from mini_engine.kv.block_tensor import Request, plan_packed
from tests.l5.helpers import request_of

CPU = torch.device("cpu")


def chunk(prompt_len, start, stop, blocks):
    return Chunk(request_of(prompt_len), start, stop, array("i", blocks))


MIXED = [
    chunk(3, 0, 3, [5]),  # a whole prompt
    chunk(5, 4, 5, [2, 7]),  # a decode
    chunk(9, 2, 6, [3, 1]),  # a chunk that ends in mid-prompt
]


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


def test_the_tokens_fed_are_those_of_the_chunks():
    assert plan_step(MIXED, 4, CPU).token_ids.tolist() == [1, 2, 3, 5, 3, 4, 5, 6]


def test_logits_are_computed_for_the_last_row_of_each_chunk_that_samples():
    assert plan_step(MIXED, 4, CPU).rows.tolist() == [2, 3], "the third chunk ends in mid-prompt and samples no token"
    assert plan_step(MIXED[2:], 4, CPU).rows.tolist() == []


def test_kernel_tables_are_int32_and_torch_indices_int64():
    step = plan_step(MIXED, 4, CPU)
    meta = step.meta
    assert meta.cu_seqlens_q.dtype == meta.seq_lens_kv.dtype == meta.block_table.dtype == torch.int32
    for name, tensor in (
        ("positions", meta.positions),
        ("slot_mapping", meta.slot_mapping),
        ("token_ids", step.token_ids),
    ):
        assert tensor.dtype == torch.int64, f"{name} is {tensor.dtype}; torch indexes with int64"


def test_blocks_beyond_a_chunk_are_in_the_table_but_not_in_the_slots():
    meta = plan_step([chunk(30, 4, 6, [9, 8, 7, 6])], 4, CPU).meta
    assert meta.block_table.tolist() == [[9, 8, 7, 6]] and meta.slot_mapping.tolist() == [32, 33]


@settings(max_examples=60)
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
        simple.append(Request(list(range(1, start + count + 1)), table, cur_len=start))
        chunks.append(chunk(start + count, start, start + count, table.blocks))
    want, got = plan_packed(simple, size, CPU), plan_step(chunks, size, CPU).meta
    for name, tensor in vars(want).items():
        assert got.__dict__[name] == tensor if name == "block_size" else torch.equal(getattr(got, name), tensor), name


class Echo:
    """A model that returns its arguments."""

    def __call__(self, token_ids, kv, meta, rows=None):
        return token_ids, kv, meta, rows


def test_the_model_is_called_with_the_plan_and_never_sees_a_request():
    pool = type("Pool", (), {"K": [torch.zeros(10, 4, 1, 2)], "device": CPU})()
    token_ids, kv, meta, rows = ModelRunner(Echo(), pool).run(MIXED)
    assert kv is pool and token_ids.shape == meta.positions.shape == (8,) and rows.tolist() == [2, 3]
