"""Lesson 16. An engine reads latents in two ways, expanded and absorbed: the tokens are Hugging Face's by both."""

from collections import Counter

import pytest
import torch

from lessons.l10_device.loop import DeviceKv, generate_on_device
from lessons.l10_device.req_to_token import ReqToTokenPool
from lessons.l10_device.slot_allocator import TokenToKVPoolAllocator
from lessons.l10_device.slot_pool import SlotPool
from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.kv.block_tensor import KvPool
from mini_engine.latents import store
from mini_engine.latents.store import LatentKv
from tests.shared.latents import FAMILIES, LONG, NEW, PROMPTS, checkpoint, latents, load, model
from tests.support import ask, check_answers, drain, hf_greedy, hugging_face, refused, some_ids

pytestmark = pytest.mark.reference


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
    said = [tuple(hf_greedy(hugging_face(checkpoint(family)), list(LONG), NEW)) for family in FAMILIES]
    assert len(set(said)) == len(FAMILIES)


def test_steps_in_which_some_sequences_are_expanded_and_others_absorbed(ways):
    engine, mixed = latents(chunk=16, budget=40), 0
    requests = ask(engine, PROMPTS)
    while engine.has_unfinished:
        ways.clear()
        engine.step()
        mixed += len(ways) == 2
    check_answers(requests, checkpoint(), "mixed")
    assert mixed >= 3, "a chunk at a prompt's beginning is expanded, decodes beside it are absorbed"


def test_a_decode_step_expands_nothing(ways):
    engine = latents()
    requests = ask(engine, PROMPTS)
    engine.step()
    assert ways["expanded"] == 3 * len(PROMPTS), "in each of three layers every whole prompt"
    ways.clear()
    drain(engine)
    assert set(ways) == {"absorbed"}
    check_answers(requests, checkpoint(), "decoded")


def test_lesson_10s_loop_with_its_own_pool():
    config, page, size = model().config, 4, 304
    blocks = KvPool(config, size // page + 1, page, load_kernel("torch", latents=True))
    for layer in (*blocks.K, *blocks.V):
        layer.fill_(float("nan"))
    table, allocator = ReqToTokenPool(len(PROMPTS), 144), TokenToKVPoolAllocator(size, page)
    kv = DeviceKv(table, allocator, SlotPool(blocks), LatentKv(config, blocks))
    want = [hf_greedy(hugging_face(checkpoint()), list(ids), NEW) for ids in PROMPTS]
    for _ in range(2):
        assert generate_on_device(model(), kv, PROMPTS, NEW) == want
    assert allocator.available_size() == size, "all slots are free again"


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
