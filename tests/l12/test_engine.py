"""Lesson 12. An engine with tiers answers as one without, also after a restart; `cache` looks after what is kept."""

import json

import pytest
import torch

from lessons.l12_tiers.compact import compact, shrink
from mini_engine.__main__ import main
from mini_engine.assembly.loading import load
from mini_engine.base.errors import UserError
from mini_engine.gpu.graphs import GraphRunner
from mini_engine.kv.block_table import NULL_BLOCK
from mini_engine.pocket import POCKET_DIR
from mini_engine.tiers.opening import digest_of
from tests.shared.tier_cells import PROMPTS
from tests.support import ask, refused, store_of


def bits(layer):
    """What all blocks but the null block hold: a slot that nothing has written may be NaN."""
    return layer[NULL_BLOCK + 1 :].view(torch.int32)


def test_another_models_blocks_are_never_served(engine_of, answers, tmp_path):
    kept = dict(kv_cache_dir=tmp_path, kv_always=True)
    first = engine_of(**kept)
    answers(first)
    store_of(first).tiers.close()
    other = load(POCKET_DIR, "float32", "cpu")
    other.model.norm.weight[0] += 1.0
    second = engine_of(other, **kept)
    answers(second)
    assert store_of(second).restored_tokens == 0, "one weight differs, so every key does"


def test_compaction_and_a_smaller_pool_in_mid_decode_change_no_token(engine_of, answers, cold):
    engine = engine_of()
    manager = engine.scheduler.manager
    answers(engine, [[9] * 70, [8] * 70])
    manager.coordinator.prefixes.tree.evict(5)
    requests = ask(engine, PROMPTS, 6, ignore_eos=True)
    moved = 0
    while engine.has_unfinished:
        engine.step()
        moved += compact(manager)
        if manager.allocator.num_blocks > 40:
            shrink(manager, engine.runner.pool, 40)
    assert [request.output_ids for request in requests] == cold
    assert moved and engine.runner.pool.num_blocks == 40


def test_recorded_steps_follow_a_pool_that_shrinks(engine_of, answers, cold):
    """A recording has addresses. With those of the larger pool it would read, and write, memory that is no longer K."""
    engine = engine_of()
    manager, pool, recorded = engine.scheduler.manager, engine.runner.pool, []

    def at_its_addresses(work):
        addresses = [layer.data_ptr() for layer in (*pool.K, *pool.V)]
        before = [bits(layer).clone() for layer in pool.K]
        work()
        assert all(map(torch.equal, before, map(bits, pool.K))), "recording changed K"
        recorded.append(len(pool.K[0]))

        def replay():
            assert addresses == [layer.data_ptr() for layer in (*pool.K, *pool.V)], "the recording is of another pool"
            work()

        return replay

    engine.runner = GraphRunner(engine.runner, 4, at_its_addresses)
    requests = ask(engine, PROMPTS, 6, ignore_eos=True)
    while engine.has_unfinished:
        engine.step()
        if min(len(request.output_ids) for request in requests) == 3 and pool.num_blocks > 40:
            shrink(manager, pool, 40)
    assert [request.output_ids for request in requests] == cold
    assert recorded == [60] * 3 + [40] * 3, "each size once, and once more over the smaller pool"


def test_a_pool_cannot_shrink_below_what_is_held(engine_of):
    engine = engine_of(num_blocks=20)
    engine.scheduler.manager.allocator.alloc_blocks(10)
    with pytest.raises(ValueError, match="10"):
        shrink(engine.scheduler.manager, engine.runner.pool, 10)
    assert engine.runner.pool.num_blocks == 20, "a call that cannot be carried out changes nothing"
    with pytest.raises(ValueError, match="21"):
        shrink(engine.scheduler.manager, engine.runner.pool, 21)


def test_a_pool_shrinks_to_what_is_held_and_hands_out_no_block_beyond(engine_of):
    engine = engine_of(num_blocks=20)
    manager, pool = engine.scheduler.manager, engine.runner.pool
    in_front = manager.allocator.alloc_blocks(6)
    manager.allocate("a", [7] * 40)
    manager.grow("a", 40)
    manager.allocator.free(in_front)
    shrink(manager, pool, 4)
    assert pool.num_blocks == manager.allocator.num_blocks == len(manager.allocator.counts) == 4
    assert sorted(manager.tables["a"].blocks) == [1, 2, 3], "the held blocks move to the front first"
    assert manager.allocator.num_free == 0, "a free block beyond the pool's end would be written out of bounds"
    shrink(manager, pool, 4)
    assert pool.num_blocks == 4, "a pool may keep its size"
    manager.free("a")
    assert sorted(manager.allocator.free_blocks) == [1, 2, 3]


def test_the_tiers_follow_a_pool_that_shrinks(engine_of, answers, cold):
    engine = engine_of(kv_host_bytes=2**24, kv_always=True)
    manager = engine.scheduler.manager
    shrink(manager, engine.runner.pool, 40)
    assert answers(engine) == cold
    manager.coordinator.clear()
    assert answers(engine) == cold, "what was saved is what the smaller pool held, and it comes back there"
    assert store_of(engine).restored_tokens == 3 * 32


@pytest.mark.parametrize(
    ("options", "param", "values"),
    [
        ({"kv_host_bytes": -1}, "kv_host_bytes", "-1"),
        ({"kv_host_bytes": 100}, "kv_host_bytes", "100"),
        ({"kv_disk_bytes": 5}, "kv_disk_bytes", "5"),
        ({"kv_host_bytes": 10**8, "enable_prefix_caching": False}, "enable_prefix_caching", ""),
    ],
)
def test_sizes_that_make_no_tier_are_refused_in_one_sentence(engine_of, options, param, values):
    """Nor is an option that would do nothing accepted in silence."""
    with refused(UserError, values) as caught:
        engine_of(num_blocks=8, **options)
    assert caught.value.param == param


def test_the_cache_command_lists_verifies_and_clears(engine_of, answers, tmp_path, capsys):
    engine = engine_of(kv_cache_dir=tmp_path, kv_always=True)
    answers(engine)
    store_of(engine).tiers.close()
    assert told(capsys, "list", tmp_path)["records"] == 6
    assert told(capsys, "verify", tmp_path)["bad"] == []
    path = next(iter(tmp_path.glob("??/*.kv")))
    path.write_bytes(path.read_bytes()[:-1])
    assert told(capsys, "verify", tmp_path, "--remove", code=1)["bad"] == [{"file": path.name, "reason": "truncated"}]
    assert told(capsys, "clear", tmp_path)["removed"] == 5 and not list(tmp_path.glob("??/*.kv"))


def test_the_cache_command_needs_a_directory(tmp_path, capsys):
    assert main(["cache", "list", str(tmp_path / "none")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def told(capsys, action, folder, *options, code=0):
    assert main(["cache", action, str(folder), *options, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_weights_of_the_same_bytes_and_another_dtype_or_name_are_other_weights():
    zeros = torch.zeros(4)
    digests = [
        digest_of([(name, (4,), dtype, [zeros])])
        for name, dtype in (("a", torch.float32), ("b", torch.float32), ("a", torch.int32))
    ]
    assert len(set(digests)) == 3
    assert digest_of([("a", (4,), torch.float32, [zeros[:1], zeros[1:]])]) == digests[0], "in pieces or whole"
