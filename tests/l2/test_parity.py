"""Lesson 2. Tokens equal Hugging Face's for any block size, order of blocks and size of the pool."""

import random

import pytest
import torch

from mini_engine.base.errors import OutOfBlocks
from mini_engine.engine.loop import generate
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.token_flat import FlatKvPool, FlatRequest, PagedSequence
from tests.support import FAMILIES, both, first_difference, hf_greedy, must_raise, some_ids


def poisoned(config, num_slots):
    """Return a pool in which every slot is NaN until it is written, so that reading a stray slot shows."""
    pool = FlatKvPool(config, num_slots)
    for tensor in (*pool.K, *pool.V):
        tensor.fill_(float("nan"))
    return pool


def run(model, prompt, new_tokens, block_size, num_blocks, shuffle=None):
    num_slots = num_blocks * block_size
    pool, allocator = poisoned(model.config, num_slots), BlockAllocator.for_slots(num_slots, block_size)
    if shuffle is not None:
        random.Random(shuffle).shuffle(allocator.free_blocks)
    sequence = PagedSequence(FlatRequest(prompt), pool, allocator)
    output = generate(model, pool, sequence, prompt, new_tokens)
    sequence.release()
    assert allocator.num_free == num_blocks, "not every block was returned"
    request = sequence.request
    assert (request.blocks, request.slot_indices, request.cur_len) == ([], [], 0), (
        "after a release, a request holds nothing"
    )
    return output


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block_size", [1, 7, 16, 64])
def test_tokens_equal_hugging_face_for_every_block_size(family, block_size):
    ours, hf = both(family)
    prompt = some_ids(30, ours.config.vocab_size)
    want = hf_greedy(hf, prompt, 24)
    got = run(ours, prompt, 24, block_size, num_blocks=-(-54 // block_size), shuffle=1)
    assert got == want, f"the answers differ from new token {first_difference(got, want)} on; 0 is the prefill's"


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 63, 1000])
def test_tokens_equal_for_short_and_long_prompts_and_around_a_block_edge(length):
    ours, hf = both("eight, odd sizes")
    prompt = some_ids(length, ours.config.vocab_size)
    got, want = run(ours, prompt, 8, 16, num_blocks=-(-(length + 8) // 16), shuffle=3), hf_greedy(hf, prompt, 8)
    assert got == want, f"the answers differ from new token {first_difference(got, want)} on; 0 is the prefill's"


def test_a_pool_of_exactly_the_needed_size_is_enough():
    # the last new token's KV is never written: 9 prompt tokens and 8 of 9 new ones take 17 slots, one more than a block
    ours, hf = both("four, with biases")
    prompt = some_ids(9, ours.config.vocab_size)
    assert run(ours, prompt, 8, 16, num_blocks=1) == hf_greedy(hf, prompt, 8)
    with must_raise(OutOfBlocks, "17 slots are needed, and a pool of one block has 16"):
        run(ours, prompt, 9, 16, num_blocks=1)


def test_a_sequence_that_has_already_run_or_has_another_prompt_is_refused():
    ours, _ = both("two, tied, wide heads")
    pool, allocator = FlatKvPool(ours.config, 64), BlockAllocator(4, reserved=0)
    sequence = PagedSequence(FlatRequest([1, 2, 3]), pool, allocator)
    generate(ours, pool, sequence, [1, 2, 3], 4)
    free = allocator.num_free
    fresh = PagedSequence(FlatRequest([1, 2, 3]), pool, allocator)
    for used, prompt in ((sequence, [1, 2, 3]), (sequence, [9] * 7), (fresh, [1, 2, 3, 4]), (fresh, [9] * 3)):
        with pytest.raises(ValueError):
            generate(ours, pool, used, prompt, 4)
    assert allocator.num_free == free


def test_two_requests_interleaved_do_not_touch_each_other():
    ours, hf = both("two, tied, wide heads")
    pool, allocator = poisoned(ours.config, 128), BlockAllocator(32, 4, reserved=0)
    prompts = [some_ids(10, ours.config.vocab_size, 1), some_ids(13, ours.config.vocab_size, 2)]
    sequences = [PagedSequence(FlatRequest(p), pool, allocator) for p in prompts]
    tokens = [list(p) for p in prompts]
    with torch.inference_mode():
        for _ in range(10):
            for sequence, ids in zip(sequences, tokens, strict=True):
                meta = sequence.plan(ids)
                last = torch.tensor([len(meta.positions) - 1])
                logits = ours(torch.tensor(ids)[meta.positions], pool, meta, rows=last)
                sequence.commit(meta)
                ids.append(int(logits.argmax()))
    for prompt, ids in zip(prompts, tokens, strict=True):
        assert ids[len(prompt) :] == hf_greedy(hf, prompt, 10), "one request wrote or read the other's blocks"
