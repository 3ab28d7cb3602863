"""Lesson 5. Tokens equal Hugging Face's: batched, in chunks of any size, preempted after any step, beside aborts."""

import functools

import pytest

from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from tests.stubs import check_empty, drain
from tests.support import both, hf_greedy, some_ids

FAMILY = "two, tied, wide heads"
LENGTHS = [1, 2, 7, 15, 16, 17, 33, 63]
NEW = 16


@functools.cache
def prompt_and_answer(length, new_tokens=NEW):
    """Return a prompt and Hugging Face's answer to it alone."""
    _, hf = both(FAMILY)
    prompt = some_ids(length, hf.config.vocab_size, seed=length)
    return prompt, hf_greedy(hf, prompt, new_tokens)


def engine_for(num_blocks=64, block_size=8, **limits):
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "watermark": 0} | limits
    engine = Engine.for_model(
        both(FAMILY)[0],
        num_blocks=num_blocks,
        block_size=block_size,
        kernel="torch",
        scheduler_config=SchedulerConfig(**limits),
    )
    for tensor in (*engine.runner.pool.K, *engine.runner.pool.V):
        tensor.fill_(float("nan"))  # the null block and every unwritten slot
    return engine


def add(engine, lengths, new_tokens=NEW):
    for length in lengths:
        prompt, _ = prompt_and_answer(length, new_tokens)
        engine.add_request(str(length), prompt, SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True))


def check_answers(finished, lengths, new_tokens=NEW):
    for length in lengths:
        got, want = finished[str(length)].output_ids, prompt_and_answer(length, new_tokens)[1]
        where = next((i for i, pair in enumerate(zip(got, want, strict=False)) if pair[0] != pair[1]), None)
        assert got == want, f"the prompt of {length} tokens: new token {where} differs from the one it gets alone"


def test_batched_requests_equal_hugging_face_alone():
    engine = engine_for()
    add(engine, LENGTHS)
    check_answers(drain(engine), LENGTHS)
    check_empty(engine)


@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_a_pool_at_a_quarter_of_the_load_finishes_all(block_size):
    need = [-(-(length + NEW - 1) // block_size) for length in LENGTHS]
    engine = engine_for(num_blocks=max(max(need), sum(need) // 4) + 1, block_size=block_size)
    add(engine, LENGTHS)
    check_answers(drain(engine), LENGTHS)
    assert engine.scheduler.num_preemptions > 0, "no request was preempted, so this tests nothing"
    check_empty(engine)


@pytest.mark.parametrize("chunk_size", range(1, 19))
def test_chunks_of_every_size_give_the_same_tokens(chunk_size):
    engine = engine_for(chunked_prefill_size=chunk_size)
    add(engine, [18, 11, 3], new_tokens=6)
    check_answers(drain(engine), [18, 11, 3], new_tokens=6)


@pytest.mark.parametrize("steps", range(1, 13))
def test_the_only_request_preempted_after_any_step(steps):
    # 21 tokens, chunks of 5, blocks of 8: in mid-prompt after steps 1 to 4; the 4th new token fills a block
    engine = engine_for(chunked_prefill_size=5)
    add(engine, [21], new_tokens=10)
    for _ in range(steps):
        engine.step()
    engine.scheduler.preempt(engine.scheduler.running[0])
    assert engine.scheduler.manager.blocks_by_state.held == 0
    finished = drain(engine)
    check_answers(finished, [21], new_tokens=10)
    assert finished["21"].num_preemptions == 1
    check_empty(engine)


def test_a_draw_depends_on_the_seed_and_not_on_the_batch():
    prompt = prompt_and_answer(7)[0]
    params = SamplingParams(temperature=1.5, seed=11, max_tokens=12, ignore_eos=True)
    alone = engine_for()
    alone.add_request("a", prompt, params)
    want = drain(alone)["a"].output_ids
    crowded = engine_for(num_blocks=16, chunked_prefill_size=3)
    add(crowded, [15, 16, 17])
    crowded.add_request("a", prompt, params)
    for _ in range(6):
        crowded.step()
    if (request := crowded.scheduler.requests["a"]) in crowded.scheduler.running:
        crowded.scheduler.preempt(request)
    assert drain(crowded)["a"].output_ids == want
