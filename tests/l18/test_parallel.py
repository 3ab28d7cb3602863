"""Lesson 18. A model cut in shares: each rank holds its part, and the tokens are those of one process."""

import pytest

from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.families.qwen3 import load_model
from mini_engine.gpu.graphs import no_graph
from mini_engine.pocket import POCKET_DIR
from tests.l18.ranks import engine_over, started

nightly = pytest.mark.nightly
OPTIONS = {"num_blocks": 60, "block_size": 8}
PROMPTS = [[5, 9, 11, 30] * 6, [7], [5, 9, 11, 30] * 4 + [8], list(range(100, 140))]


def answers(engine, **params):
    """Answer all prompts together; return their tokens and errors."""
    chosen = SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True} | params)
    requests = [engine.add_request(str(i), ids, chosen) for i, ids in enumerate(PROMPTS)]
    while engine.has_unfinished:
        engine.step()
    return [request.output_ids for request in requests], [request.error for request in requests]


# ---------------------------------------------------------------- two processes


@pytest.fixture(scope="module")
def ranks():
    with started() as ranks:
        yield ranks


@pytest.fixture(scope="module")
def expected():
    model = load_model(POCKET_DIR)
    return {
        **{seed: answers(Engine.for_model(model, **OPTIONS), temperature=0.8, seed=seed)[0] for seed in (3, 4)},
        "greedy": answers(Engine.for_model(model, **OPTIONS))[0],
    }


@pytest.mark.nightly
def test_the_pools_of_both_ranks_are_one_pool(ranks):
    engine = engine_over(ranks, **OPTIONS)
    assert 2 * engine.runner.pool.bytes == Engine.for_model(load_model(POCKET_DIR), **OPTIONS).runner.pool.bytes


@pytest.mark.parametrize(
    "limits",
    [pytest.param({}, marks=pytest.mark.ci)]
    + [pytest.param(one, marks=nightly) for one in ({"chunked_prefill_size": 5}, {"max_num_seqs": 2})],
)
def test_tokens_are_those_of_one_process(ranks, expected, limits):
    engine = engine_over(ranks, **OPTIONS, scheduler_config=SchedulerConfig(**limits))
    for _ in range(2):
        assert answers(engine) == (expected["greedy"], [None] * 4)
    assert engine.scheduler.manager.coordinator.prefixes.stats.found_tokens > 0, "the second time prefixes are shared"


@nightly
def test_a_pool_that_is_too_small_preempts_and_changes_no_token(ranks):
    tight = {"num_blocks": 12, "block_size": 8, "scheduler_config": SchedulerConfig(watermark=0.0)}
    engine = engine_over(ranks, **tight)
    wide = Engine.for_model(load_model(POCKET_DIR), **OPTIONS)
    assert answers(engine, max_tokens=40) == answers(wide, max_tokens=40)
    assert engine.scheduler.num_preemptions > 0, "the pool was to be too small for all of them"


@nightly
@pytest.mark.parametrize("seed", [3, 4])
def test_a_seeded_sample_is_the_same_over_two_ranks(ranks, expected, seed):
    engine = engine_over(ranks, **OPTIONS)
    assert answers(engine, temperature=0.8, seed=seed)[0] == expected[seed], "rank 0 alone draws"


@nightly
def test_captured_steps_are_padded_in_both_ranks(ranks, expected):
    limits = SchedulerConfig(max_num_seqs=8)
    engine = engine_over(ranks, capture=no_graph, scheduler_config=limits, **OPTIONS)
    assert answers(engine)[0] == expected["greedy"] and engine.runner.replays, "four requests, eight rows at most"
