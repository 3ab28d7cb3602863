"""Lesson 5. Tokens equal Hugging Face's: batched, in chunks of any size, preempted after any step, beside aborts."""

import pytest

from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from tests.stubs import check_empty, drain
from tests.support import ask, both, check_answers, checkpoint, some_ids

FAMILY = "two, tied, wide heads"
LENGTHS = [1, 2, 7, 15, 16, 17, 33, 63]
NEW = 16


def prompts_of(lengths):
    return [some_ids(length, 160, seed=length) for length in lengths]


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


def answered(engine, lengths, when, new_tokens=NEW):
    """Check that prompts of these lengths get the answers that each gets alone."""
    requests = ask(engine, prompts_of(lengths), new_tokens, ignore_eos=True)
    drain(engine)
    check_answers(requests, checkpoint(FAMILY), when)
    check_empty(engine)


def test_batched_requests_equal_hugging_face_alone():
    answered(engine_for(), LENGTHS, "batched")


@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_a_pool_at_a_quarter_of_the_load_finishes_all(block_size):
    need = [-(-(length + NEW - 1) // block_size) for length in LENGTHS]
    engine = engine_for(num_blocks=max(max(need), sum(need) // 4) + 1, block_size=block_size)
    answered(engine, LENGTHS, "in a small pool")
    assert engine.scheduler.num_preemptions > 0, "no request was preempted, so this tests nothing"


@pytest.mark.parametrize("chunk_size", range(1, 19))
def test_chunks_of_every_size_give_the_same_tokens(chunk_size):
    answered(engine_for(chunked_prefill_size=chunk_size), [18, 11, 3], f"in chunks of {chunk_size}", new_tokens=6)


@pytest.mark.parametrize("steps", range(1, 13))
def test_the_only_request_preempted_after_any_step(steps):
    # 21 tokens, chunks of 5, blocks of 8: in mid-prompt after steps 1 to 4; the 4th new token fills a block
    engine = engine_for(chunked_prefill_size=5)
    [request] = ask(engine, prompts_of([21]), 10, ignore_eos=True)
    for _ in range(steps):
        engine.step()
    engine.scheduler.preempt(request)
    assert engine.scheduler.manager.blocks_by_state.held == 0
    drain(engine)
    check_answers([request], checkpoint(FAMILY), f"preempted after step {steps}")
    assert request.num_preemptions == 1
    check_empty(engine)


def test_a_draw_depends_on_the_seed_and_not_on_the_batch():
    [prompt] = prompts_of([7])
    params = SamplingParams(temperature=1.5, seed=11, max_tokens=12, ignore_eos=True)
    alone = engine_for()
    alone.add_request("a", prompt, params)
    want = drain(alone)["a"].output_ids
    crowded = engine_for(num_blocks=16, chunked_prefill_size=3)
    ask(crowded, prompts_of([15, 16, 17]), NEW, ignore_eos=True)
    crowded.add_request("a", prompt, params)
    for _ in range(6):
        crowded.step()
    if (request := crowded.scheduler.requests["a"]) in crowded.scheduler.running:
        crowded.scheduler.preempt(request)
    assert drain(crowded)["a"].output_ids == want
