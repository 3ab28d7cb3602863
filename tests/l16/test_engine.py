"""Lesson 16. An engine reads latents in two ways, expanded and absorbed: the tokens are Hugging Face's by both."""

from collections import Counter

import pytest
import torch

from mini_engine.base.errors import UserError
from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.latents import reading, store
from tests.l16.models import (
    FAMILIES,
    LONG,
    PROMPTS,
    answered,
    ask,
    check_answers,
    drain,
    each_kernel,
    greedy,
    latents,
    load,
    model,
    pollute,
)
from tests.support import refused, some_ids

pytestmark = pytest.mark.reference
nightly = pytest.mark.nightly
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


def test_what_sets_the_families_apart_changes_what_is_said():
    """Otherwise tests of these families would pass with a model that ignores it."""
    said = [tuple(greedy(LONG, family)) for family in FAMILIES]
    assert len(set(said)) == len(FAMILIES)


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


# ---------------------------------------------------------------- sizes, and what is refused


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
