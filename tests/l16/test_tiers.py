"""Lesson 16. Latents come back with lesson 12's blocks: after eviction, after a restart, and never another model's."""

import random

import pytest

from lessons.l12_tiers.compact import compact, shrink
from mini_engine.latents.model import latent_model
from mini_engine.tiers.store import ALWAYS
from tests.l16.models import (
    BLOCK,
    FOUND,
    LONG,
    NEW,
    PROMPTS,
    answered,
    ask,
    check_answers,
    check_nothing_is_lost,
    drain,
    latents,
    model,
)

pytestmark = pytest.mark.reference
NOTHING = [0] * len(FOUND)


def with_tiers(folder=None, **options):
    return latents(kv_cache_dir=folder, **{"kv_host_bytes": 2**28, "kv_always": True} | options)


def store_of(engine):
    return engine.scheduler.manager.coordinator.connector.block_store


def tree_of(engine):
    return engine.scheduler.manager.coordinator.prefixes.tree


def test_evicted_latents_come_back_from_host_memory():
    engine = with_tiers()
    assert answered(engine, "cold") == NOTHING
    engine.scheduler.manager.coordinator.clear()
    assert answered(engine, "from the host") == FOUND, "up to the last whole block of each prompt"
    check_nothing_is_lost(engine)


def test_a_record_is_a_block_of_latents_and_rotary_keys():
    engine = with_tiers()
    [_] = ask(engine, [LONG])
    drain(engine)
    records = store_of(engine).tiers.host.records.values()
    each = 3 * BLOCK * (24 + 8) * 4
    assert {len(record.payload) for record in records} == {each}, "K and V of four heads would be 3.75 times as large"
    assert len(records) == (len(LONG) + 9) // BLOCK


def test_a_new_engine_on_the_same_directory_begins_with_the_latents_of_the_last(tmp_path):
    first = with_tiers(tmp_path)
    answered(first, "cold")
    store_of(first).tiers.close()
    second = with_tiers(tmp_path, backend="torch")
    assert answered(second, "from the disk") == FOUND, "other layers make the same latents"
    assert store_of(second).restored_tokens == sum(FOUND)
    check_nothing_is_lost(second)


@pytest.mark.parametrize(
    "options",
    [{"block_size": 4}, {"family": "yarn"}, {"family": "plain rotary, tied"}],
    ids=lambda options: str(*options.values()),
)
def test_another_engine_s_records_are_not_found(tmp_path, options):
    first = with_tiers(tmp_path)
    answered(first, "cold", [LONG])
    store_of(first).tiers.close()
    second = with_tiers(tmp_path, **options)
    [request] = ask(second, [LONG])
    drain(second)
    assert not request.error and request.num_cached_tokens == 0


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


def test_a_preempted_request_comes_back_from_the_tiers():
    engine, chance = with_tiers(), random.Random(0)
    requests = ask(engine)
    while engine.has_unfinished:
        engine.step()
        if chance.random() < 0.5 and engine.scheduler.running:
            engine.scheduler.preempt(chance.choice(engine.scheduler.running))
            tree_of(engine).evict(100)
    check_answers(requests, "preempted")
    assert engine.scheduler.num_preemptions and store_of(engine).restored_tokens
    check_nothing_is_lost(engine)


def test_the_tiers_go_on_where_the_tree_ends():
    engine = with_tiers()
    answered(engine, "cold", [LONG])
    tree_of(engine).evict(8)
    assert answered(engine, "tree and tiers", [LONG]) == [128]
    assert 0 < store_of(engine).restored_tokens < 128, "the tree's blocks are not copied again"


def test_a_damaged_record_is_a_miss(tmp_path):
    first = with_tiers(tmp_path)
    answered(first, "cold", [LONG])
    store_of(first).tiers.close()
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.stat().st_size > BLOCK * 3 * 32 * 4:
            content = bytearray(path.read_bytes())
            content[-100] ^= 1
            path.write_bytes(content)
    second = with_tiers(tmp_path)
    assert answered(second, "beside damage", [LONG]) == [0]
    assert store_of(second).tiers.disk.counts["damaged"]


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
