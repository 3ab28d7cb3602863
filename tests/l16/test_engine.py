"""Lesson 16. Every token equals Hugging Face's: batched, in chunks, preempted, behind a prefix, expanded, absorbed."""

import random
from collections import Counter

import pytest
import torch

from mini_engine.base.errors import UserError
from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.latents import reading, store
from tests.l16.models import (
    FAMILIES,
    FIRST,
    FOUND,
    LONG,
    NEW,
    PROMPTS,
    answered,
    ask,
    check_answers,
    check_nothing_is_lost,
    drain,
    each_kernel,
    greedy,
    hugging_face,
    latents,
    load,
    model,
    pollute,
)
from tests.support import refused, some_ids

pytestmark = pytest.mark.reference
nightly = pytest.mark.nightly
each_family = pytest.mark.parametrize("family", FAMILIES)
WAYS = {"expanded": lambda config, q_len, kv_len: True, "absorbed": lambda config, q_len, kv_len: False}


@pytest.fixture
def ways(monkeypatch):
    """Count how latents are read: sequences that are expanded, and calls with the others."""
    counts, absorbed, expanded = Counter(), store.LatentKv.absorbed, store.expanded_attention

    def count_absorbed(self, layer, q, kv_b, batch):
        counts["absorbed"] += 1
        return absorbed(self, layer, q, kv_b, batch)

    def count_expanded(*args):
        counts["expanded"] += 1
        return expanded(*args)

    monkeypatch.setattr(store.LatentKv, "absorbed", count_absorbed)
    monkeypatch.setattr(store, "expanded_attention", count_expanded)
    return counts


@each_family
def test_batched_and_then_behind_their_own_latents(family):
    engine = latents(family)
    assert answered(engine, "cold", family=family) == [0] * len(PROMPTS)
    assert answered(engine, "warm", family=family) == FOUND, (
        "of a prompt that comes again, only the last block is computed"
    )
    check_nothing_is_lost(engine)


def test_what_sets_the_families_apart_changes_what_is_said():
    """Otherwise the test above would pass with an engine that ignores it."""
    said = [tuple(greedy(LONG, family)) for family in FAMILIES]
    assert len(set(said)) == len(FAMILIES)


@pytest.mark.parametrize("family", [FIRST, *(pytest.param(name, marks=nightly) for name in FAMILIES if name != FIRST)])
@each_kernel
def test_every_kernel_in_chunks(family, kernel):
    engine = latents(family, kernel=kernel, chunk=33, budget=64)
    answered(engine, "cold", family=family)
    answered(engine, "warm", family=family)


def test_alone_and_uncached():
    engine = latents(enable_prefix_caching=False)
    for prompt in PROMPTS:
        assert answered(engine, "alone", [prompt]) == [0]
    check_nothing_is_lost(engine)


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_in_chunks_beside_decodes(chunk):
    engine = latents(chunk=chunk, budget=max(24, chunk))
    answered(engine, "in chunks", PROMPTS if chunk > 1 else PROMPTS[:4])
    check_nothing_is_lost(engine)


@pytest.mark.parametrize("caching", [False, True])
def test_preempted_every_few_steps(caching):
    engine, chance = latents(chunk=16, budget=24, enable_prefix_caching=caching), random.Random(0)
    requests = ask(engine)
    while engine.has_unfinished:
        engine.step()
        if chance.random() < 0.3 and engine.scheduler.running:
            engine.scheduler.preempt(chance.choice(engine.scheduler.running))
    assert engine.scheduler.num_preemptions >= 3
    check_answers(requests, "preempted")
    check_nothing_is_lost(engine)


@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=nightly) for size in (1, 16))])
def test_any_block_size_in_a_pool_that_is_nearly_too_small(size):
    longest = -(-(len(LONG) + NEW) // size)
    engine = latents(chunk=9, budget=24, block_size=size, num_blocks=2 + longest)
    for when in ("cold", "warm"):
        answered(engine, f"{when}, blocks of {size}")
    check_nothing_is_lost(engine)


@pytest.mark.parametrize("common", [3, 16, 100, 129])
def test_behind_a_part_of_another_prompt(common):
    """What they have in common ends between two blocks or within one, of which the new request has its own."""
    engine = latents()
    answered(engine, "first", [LONG])
    other = (*LONG[:common], *some_ids(20, 160, seed=common))
    assert answered(engine, "second", [other]) == [common // 8 * 8]
    assert answered(engine, "both again", [LONG, other]) == [128, (len(other) - 1) // 8 * 8]
    check_nothing_is_lost(engine)


# ---------------------------------------------------------------- two ways to read


def test_steps_in_which_some_sequences_are_expanded_and_others_absorbed(ways):
    engine, mixed = latents(chunk=16, budget=40), 0
    requests = ask(engine)
    while engine.has_unfinished:
        ways.clear()
        engine.step()
        mixed += len(ways) == 2
    check_answers(requests, "mixed")
    assert mixed >= 3, "a chunk at a prompt's beginning is expanded, decodes beside it are absorbed"


def test_a_decode_step_expands_nothing(ways):
    engine = latents()
    requests = ask(engine)
    engine.step()
    assert ways["expanded"] == 3 * len(PROMPTS), "in each of three layers every whole prompt"
    ways.clear()
    drain(engine)
    assert set(ways) == {"absorbed"}
    check_answers(requests, "decoded")


@pytest.mark.parametrize(
    ("way", "piece"),
    [("expanded", 20), ("absorbed", 1000), *(pytest.param("expanded", size, marks=nightly) for size in (1, 8, 1000))],
)
def test_each_way_gives_the_same_tokens_whatever_fits_at_a_time(way, piece, ways, monkeypatch):
    monkeypatch.setattr(store, "expanding_pays", WAYS[way])
    monkeypatch.setattr(reading, "PIECE", piece)
    engine = latents("yarn", chunk=40, budget=64)
    answered(engine, "cold", family="yarn")
    answered(engine, "warm", family="yarn")
    assert bool(ways["expanded"]) == (way == "expanded"), "this test wants one way"
    assert ways["absorbed"], "decode steps are always absorbed"


@each_kernel
@pytest.mark.parametrize("way", WAYS)
def test_nothing_reads_what_was_not_written(way, kernel, monkeypatch):
    """The null block, where padding and the ends of tables point, is full of NaN in every step."""
    monkeypatch.setattr(store, "expanding_pays", WAYS[way])
    monkeypatch.setattr(reading, "PIECE", 16)
    engine = latents(chunk=9, budget=24, kernel=kernel)
    requests = ask(engine)
    while engine.has_unfinished:
        pollute(engine, 0)
        engine.step()
    check_answers(requests, "with NaN in the null block")


@pytest.mark.parametrize("family", ["yarn", pytest.param(FIRST, marks=nightly)])
@torch.inference_mode()
def test_log_probabilities_equal_hugging_faces(family):
    engine, ids = latents(family, chunk=13, budget=16), PROMPTS[-2]
    [request] = ask(engine, [ids], 1, prompt_logprobs=0)
    drain(engine)
    theirs = hugging_face(family)(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    expected = theirs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    got = torch.tensor([one.chosen for one in request.prompt_logprobs])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------- what ends early, and what is refused


def test_aborts_leave_nothing_behind():
    engine, chance = latents(chunk=9, budget=24), random.Random(1)
    requests = ask(engine, PROMPTS * 2)
    while engine.has_unfinished:
        engine.step()
        if chance.random() < 0.2 and engine.scheduler.requests:
            engine.abort(chance.choice(list(engine.scheduler.requests)))
    whole = [request for request in requests if request.finish_reason == "length"]
    assert 0 < len(whole) < len(requests)
    check_answers(whole, "beside aborts")
    check_nothing_is_lost(engine)


def test_more_tokens_fit_in_the_same_memory():
    """A token takes 24 + 8 numbers in each of three layers; K and V of four heads would take 4 * (20 + 10)."""
    config = model().config
    assert config.kv_bytes_per_token(torch.float32) == 3 * 32 * 4
    engine = latents(num_blocks=None, kv_bytes=2**20)
    assert engine.runner.pool.num_blocks == 2**20 // (8 * 3 * 32 * 4)
    assert 0 <= 2**20 - engine.runner.pool.bytes < 8 * 3 * 32 * 4


def test_a_request_that_can_never_fit_is_refused_when_it_comes():
    engine = latents(num_blocks=6)
    with refused(UserError, "7 8 5"):
        engine.add_request("r", some_ids(50, 160), SamplingParams(temperature=0, max_tokens=5))


def test_what_cannot_read_latents_says_so():
    with refused(UserError, "'triton' auto reference"):
        latents(kernel="triton")
    with refused(UserError, "LLM build_engine"):
        Engine.for_model(load(), num_blocks=8)
    with pytest.raises(UserError, match="fused"):
        latents(backend="fused")
