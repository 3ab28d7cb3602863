"""Lesson 3. Packed steps: the tables of a plan, and many prompts in one call with tokens equal to Hugging Face's."""

import random

import pytest
import torch

from lessons.l3_block_tensor.packed import generate_packed
from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import OutOfBlocks, UserError
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.block_table import BlockTable
from mini_engine.kv.block_tensor import KvPool, PackedRequest, plan_packed, reserve_all
from tests.support import FAMILIES, both, hf_greedy, refused, some_ids

CPU = torch.device("cpu")
LENGTHS = [1, 2, 7, 15, 16, 17, 33, 63]


GIVEN = [
    pytest.param(name, marks=pytest.mark.nightly) for name in ("reference", "torch", "cpu")
]  # kernels that no student writes
KERNELS = ["blockwise", *GIVEN]


def the_kernel(name):
    try:
        return load_kernel(name, "cpu", torch.float32)
    except UserError as why:
        pytest.skip(f"NOT CHECKED: {why}")


class HandMadeTable(BlockTable):
    """A block table with its own `lookup`, so that `plan_packed` is tested apart from the student's table."""

    def lookup(self, position):
        return self.blocks[position // self.allocator.block_size], position % self.allocator.block_size


def holding(prompt_len, blocks, cur_len=0, output_ids=(), block_size=4):
    """Return a request with room reserved for all its tokens, built by hand."""
    table = HandMadeTable(BlockAllocator(2, block_size))
    table.blocks, table.num_tokens = list(blocks), prompt_len + len(output_ids)
    return PackedRequest(list(range(10, 10 + prompt_len)), table, cur_len, list(output_ids))


@pytest.mark.task(6)
def test_prefill_and_decode_share_one_packed_plan():
    requests = [holding(3, [5]), holding(4, [2, 7], cur_len=4, output_ids=[90]), holding(6, [3, 1], cur_len=2)]
    meta = plan_packed(requests, 4, CPU)
    assert meta.cu_seqlens_q.tolist() == [0, 3, 4, 8], (
        "3 tokens from a prompt, 1 from a decode, 4 from a chunk: where each request's rows begin, and the end"
    )
    assert meta.positions.tolist() == [0, 1, 2, 4, 2, 3, 4, 5], "each fed token's position in its own sequence"
    assert meta.slot_mapping.tolist() == [20, 21, 22, 28, 14, 15, 4, 5], "slot = block * 4 + offset"
    assert meta.seq_lens_kv.tolist() == [3, 5, 6], (
        "seq_lens_kv counts each request's history and this step's own tokens; a token sees itself"
    )
    assert meta.block_table.tolist() == [[5, 0], [2, 7], [3, 1]], (
        "a row for each request: its blocks in order, then the null block, 0"
    )
    assert meta.block_size == 4, "block_size is the one that was passed"


@pytest.mark.task(6)
def test_short_tables_are_padded_with_the_null_block():
    meta = plan_packed([holding(3, [5]), holding(9, [2, 7, 1])], 4, CPU)
    assert meta.block_table.tolist() == [[5, 0, 0], [2, 7, 1]], "unused entries point at the null block, 0"


@pytest.mark.task(6)
def test_planning_changes_no_request():
    requests = [holding(3, [5]), holding(9, [2, 7, 1], cur_len=4)]
    plan_packed(requests, 4, CPU)
    assert [request.table.blocks for request in requests] == [[5], [2, 7, 1]], (
        "padding belongs in the tensor: here a request's own table was padded, and it would free the null block"
    )
    assert [request.cur_len for request in requests] == [0, 4], (
        "cur_len moves when the step has run, not when it is planned"
    )


@pytest.mark.task(6)
@pytest.mark.parametrize("name", ["cu_seqlens_q", "seq_lens_kv", "block_table"])
def test_kernel_tables_are_int32(name):
    dtype = getattr(plan_packed([holding(3, [5])], 4, CPU), name).dtype
    assert dtype == torch.int32, f"{name} is read by a kernel, and kernel tables are int32"


@pytest.mark.task(6)
@pytest.mark.parametrize("name", ["positions", "slot_mapping"])
def test_torch_indices_are_int64(name):
    dtype = getattr(plan_packed([holding(3, [5])], 4, CPU), name).dtype
    assert dtype == torch.int64, f"torch indexes with {name}, and torch's indices are int64"


@pytest.mark.task(6)
def test_a_plan_is_on_the_device_it_was_made_for():
    meta = plan_packed([holding(3, [5]), holding(9, [2, 7, 1])], 4, torch.device("meta"))  # a device without values
    tensors = {name: x for name, x in vars(meta).items() if torch.is_tensor(x)}
    elsewhere = [name for name, x in tensors.items() if x.device.type != "meta"]
    assert elsewhere == [], "every tensor of the plan belongs on `device`, or the model cannot use it there"


def test_reserve_all_takes_all_or_nothing():
    allocator = BlockAllocator(5, 4)
    requests = [PackedRequest([1] * 5, BlockTable(allocator)) for _ in range(3)]
    with pytest.raises(OutOfBlocks):
        reserve_all(requests)
    assert allocator.num_free == 4, "the third request does not fit, so the first two must hold nothing either"
    assert [r.table.num_tokens for r in requests] == [0, 0, 0]


def test_a_reserve_all_that_fails_keeps_the_blocks_held_before():
    allocator = BlockAllocator(4, 4)
    running, late = (PackedRequest([1] * length, BlockTable(allocator)) for length in (5, 8))
    reserve_all([running])
    blocks = list(running.table.blocks)
    running.output_ids += [2, 3, 4, 5]
    with pytest.raises(OutOfBlocks):
        reserve_all([running, late])
    assert (running.table.blocks, running.table.num_tokens) == (blocks, 5), (
        "its KV is in these blocks, so it must keep them"
    )


def run(model, prompts, new_tokens, kernel, block_size=16, num_blocks=None, shuffle=0):
    if num_blocks is None:
        num_blocks = 1 + sum(-(-(len(p) + new_tokens) // block_size) for p in prompts)
    pool = KvPool(model.config, num_blocks, block_size, the_kernel(kernel))
    for tensor in (*pool.K, *pool.V):
        tensor.fill_(float("nan"))  # the null block and every slot not yet written
    allocator = BlockAllocator(num_blocks, block_size)
    random.Random(shuffle).shuffle(allocator.free_blocks)
    try:
        return generate_packed(model, pool, allocator, prompts, new_tokens)
    finally:
        assert allocator.num_free == num_blocks - 1, "not every block was returned"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_eight_prompts_in_one_packed_call_equal_hugging_face_alone(family, kernel):
    ours, hf = both(family)
    prompts = [some_ids(n, ours.config.vocab_size, seed=n) for n in LENGTHS]
    got = run(ours, prompts, 10, kernel)
    for length, prompt, output in zip(LENGTHS, prompts, got, strict=True):
        assert output == hf_greedy(hf, prompt, 10), (
            f"the prompt of {length} tokens gets other tokens in the batch than alone"
        )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_tokens_equal_for_every_block_size(block_size, kernel):
    ours, hf = both("two, tied, wide heads")
    prompts = [some_ids(n, ours.config.vocab_size, seed=n) for n in (6, 7, 8, 64)]
    got = run(ours, prompts, 8, kernel, block_size)
    assert got == [hf_greedy(hf, prompt, 8) for prompt in prompts], f"blocks of {block_size} slots change the tokens"


@pytest.mark.parametrize("kernel", KERNELS)
def test_tokens_equal_behind_a_thousand_tokens(kernel):
    ours, hf = both("eight, odd sizes")
    prompts = [some_ids(1000, ours.config.vocab_size), some_ids(3, ours.config.vocab_size)]
    assert run(ours, prompts, 4, kernel) == [hf_greedy(hf, prompt, 4) for prompt in prompts], (
        "1,000 tokens of history beside a prompt of 3 change the tokens"
    )


def test_a_pool_of_exactly_the_needed_size_is_enough():
    ours, hf = both("four, with biases")
    prompts = [some_ids(9, ours.config.vocab_size), some_ids(8, ours.config.vocab_size)]
    # 9 + 8 and 8 + 8 tokens, but the last token's KV is never written: 16 and 15 slots, one block each
    assert run(ours, prompts, 8, "blockwise", num_blocks=3) == [hf_greedy(hf, p, 8) for p in prompts]
    with pytest.raises(OutOfBlocks):
        run(ours, prompts, 9, "blockwise", num_blocks=3)


def test_a_prompt_that_cannot_run_is_refused_before_any_block_is_taken():
    ours, _ = both("four, with biases")
    with pytest.raises(UserError):
        run(ours, [[1, 2], []], 4, "blockwise", num_blocks=4)


def test_a_stop_token_ends_its_own_answer_and_no_other():
    ours, hf = both("two, tied, wide heads")
    prompts = [some_ids(5, ours.config.vocab_size, seed=1), some_ids(9, ours.config.vocab_size, seed=2)]
    free = [hf_greedy(hf, p, 12) for p in prompts]
    stop = free[0][2]
    pool = KvPool(ours.config, 8, 16, the_kernel("blockwise"))
    got = generate_packed(ours, pool, BlockAllocator(8, 16), prompts, 12, {stop})
    want = [ids[: ids.index(stop) + 1] if stop in ids else ids for ids in free]
    assert got == want


@pytest.mark.parametrize("size", [(8, 8), (8, 32), (9, 16)])
def test_an_allocator_for_another_pool_is_refused(size):
    ours, _ = both("two, tied, wide heads")
    pool, allocator = KvPool(ours.config, 8, 16, the_kernel("blockwise")), BlockAllocator(*size)
    with refused(UserError, "8 16"):
        generate_packed(ours, pool, allocator, [some_ids(20, ours.config.vocab_size)], 4)
    assert allocator.num_free == allocator.num_blocks - 1
