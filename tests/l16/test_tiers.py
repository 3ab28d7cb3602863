"""Lesson 16. Records of latents: what they hold, what reading them takes, and blocks that move meanwhile."""

import pytest

from lessons.l12_tiers.compact import compact, shrink
from mini_engine.latents.model import latent_model
from mini_engine.tiers.store import ALWAYS
from tests.l16.models import (
    BLOCK,
    LONG,
    NEW,
    PROMPTS,
    answered,
    ask,
    check_answers,
    drain,
    latents,
    model,
)

pytestmark = pytest.mark.reference


def with_tiers(folder=None, **options):
    return latents(kv_cache_dir=folder, **{"kv_host_bytes": 2**28, "kv_always": True} | options)


def store_of(engine):
    return engine.scheduler.manager.coordinator.connector.block_store


def tree_of(engine):
    return engine.scheduler.manager.coordinator.prefixes.tree


def test_a_record_is_a_block_of_latents_and_rotary_keys():
    engine = with_tiers()
    [_] = ask(engine, [LONG])
    drain(engine)
    records = store_of(engine).tiers.host.records.values()
    each = 3 * BLOCK * (24 + 8) * 4
    assert {len(record.payload) for record in records} == {each}, "K and V of four heads would be 3.75 times as large"
    assert len(records) == (len(LONG) + 9) // BLOCK


def test_models_that_differ_in_nothing_but_how_they_rotate_share_no_record(tmp_path):
    """Their weights are the same, and their latents of the first layer; their rotary keys are not."""
    from dataclasses import replace

    first = with_tiers(tmp_path)
    answered(first, "cold", [LONG])
    store_of(first).tiers.close()
    other = latent_model(replace(model().config, rope_interleave=False))
    other.load_state_dict(model().state_dict())
    second = with_tiers(tmp_path, over=other.eval().requires_grad_(False))
    [request] = ask(second, [LONG])
    drain(second)
    assert not request.error and request.num_cached_tokens == 0


def test_what_pays_is_measured_for_latents(tmp_path):
    engine = with_tiers(tmp_path, kv_always=False)
    answered(engine, "cold")
    engine.scheduler.manager.coordinator.clear()
    answered(engine, "warm")
    measured = store_of(engine).min_tokens
    assert measured != ALWAYS and 0 < measured.disk < float("inf"), "what a read from the disk takes was not measured"


def test_compaction_and_a_smaller_pool_in_mid_answer_change_no_token():
    engine = latents()
    manager, pool, moved = engine.scheduler.manager, engine.runner.pool.kv, []
    answered(engine, "before", [LONG])
    requests = ask(engine, [ids for ids in PROMPTS if ids != LONG])
    for step in range(NEW):
        engine.step()
        tree_of(engine).evict(4)  # the first blocks of the pool are LONG's, and become holes
        moved.append(compact(manager))
        if step == 5:
            before = manager.allocator.num_blocks
            shrink(manager, pool, before - manager.allocator.num_free // 2)
            assert {len(layer) for layer in (*pool.K, *pool.V)} == {manager.allocator.num_blocks} != {before}
    assert any(moved), "this test wants blocks that move"
    assert not engine.has_unfinished and len(check_answers(requests, "compacted")) == len(PROMPTS) - 1
