"""Lesson 12. An engine with tiers answers as one without, also after a restart; `cache` looks after what is kept."""

import json

import pytest
import torch

from lessons.l12_tiers.compact import compact, shrink
from mini_engine.__main__ import main
from mini_engine.assembly.build import build_engine
from mini_engine.assembly.loading import load
from mini_engine.base.errors import UserError
from mini_engine.engine.offline import generate_all
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.gpu.graphs import GraphRunner
from mini_engine.kv.block_table import NULL_BLOCK
from mini_engine.pocket import POCKET_DIR
from mini_engine.tiers.opening import digest_of

PROMPTS = [[(7 * i * start + i) % 500 + 20 for i in range(40)] for start in (1, 2, 3)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return load(POCKET_DIR, "float32", "cpu")


@pytest.fixture(scope="module")
def cold(model):
    return answers(build_engine(model, backend="reference", enable_prefix_caching=False))


def answers(engine, prompts=PROMPTS):
    return [done.token_ids for done in generate_all(engine, prompts, GREEDY, progress=False)]


def bits(layer):
    """What all blocks but the null block hold: a slot that nothing has written may be NaN."""
    return layer[NULL_BLOCK + 1 :].view(torch.int32)


def with_tiers(model, folder, num_blocks=40, **sizes):
    return build_engine(model, backend="reference", num_blocks=num_blocks, kv_cache_dir=folder, kv_always=True, **sizes)


def test_another_models_blocks_are_never_served(model, cold, tmp_path):
    first = with_tiers(model, tmp_path)
    answers(first)
    first.scheduler.manager.coordinator.connector.block_store.tiers.close()
    other = load(POCKET_DIR, "float32", "cpu")
    other.model.norm.weight[0] += 1.0
    second = with_tiers(other, tmp_path)
    answers(second)
    assert second.scheduler.manager.coordinator.connector.block_store.restored_tokens == 0, (
        "one weight differs, so every key does"
    )


def test_compaction_and_a_smaller_pool_in_mid_decode_change_no_token(model, cold):
    engine = build_engine(model, backend="reference", num_blocks=60)
    manager = engine.scheduler.manager
    answers(engine, [[9] * 70, [8] * 70])
    manager.coordinator.prefixes.tree.evict(5)
    requests = [engine.add_request(str(i), prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]
    moved = 0
    while engine.has_unfinished:
        engine.step()
        moved += compact(manager)
        if manager.allocator.num_blocks > 40:
            shrink(manager, engine.runner.pool, 40)
    assert [request.output_ids for request in requests] == cold
    assert moved and engine.runner.pool.num_blocks == 40


def test_recorded_steps_follow_a_pool_that_shrinks(model, cold):
    """A recording has addresses. With those of the larger pool it would read, and write, memory that is no longer K."""
    engine = build_engine(model, backend="reference", num_blocks=60)
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
    requests = [engine.add_request(str(i), prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]
    while engine.has_unfinished:
        engine.step()
        if min(len(request.output_ids) for request in requests) == 3 and pool.num_blocks > 40:
            shrink(manager, pool, 40)
    assert [request.output_ids for request in requests] == cold
    assert recorded == [60] * 3 + [40] * 3, "each size once, and once more over the smaller pool"


def test_a_pool_cannot_shrink_below_what_is_held(model):
    engine = build_engine(model, backend="reference", num_blocks=20)
    engine.scheduler.manager.allocator.alloc_blocks(10)
    with pytest.raises(ValueError, match="10"):
        shrink(engine.scheduler.manager, engine.runner.pool, 10)
    assert engine.runner.pool.num_blocks == 20, "a call that cannot be carried out changes nothing"
    with pytest.raises(ValueError, match="21"):
        shrink(engine.scheduler.manager, engine.runner.pool, 21)


def test_a_pool_shrinks_to_what_is_held_and_hands_out_no_block_beyond(model):
    engine = build_engine(model, backend="reference", num_blocks=20)
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


def test_the_tiers_follow_a_pool_that_shrinks(model, cold):
    engine = build_engine(model, backend="reference", num_blocks=60, kv_host_bytes=2**24, kv_always=True)
    manager = engine.scheduler.manager
    shrink(manager, engine.runner.pool, 40)
    assert answers(engine) == cold
    manager.coordinator.clear()
    assert answers(engine) == cold, "what was saved is what the smaller pool held, and it comes back there"
    assert manager.coordinator.connector.block_store.restored_tokens == 3 * 32


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"kv_host_bytes": -1}, "kv_host_bytes"),
        ({"kv_host_bytes": 100}, "kv_host_bytes"),
        ({"kv_disk_bytes": 5}, "kv_disk_bytes"),
    ],
)
def test_sizes_that_make_no_tier_are_refused_in_one_sentence(model, options, param):
    with pytest.raises(UserError) as caught:
        build_engine(model, backend="reference", num_blocks=8, **options)
    assert caught.value.param == param and str(next(iter(options.values()))) in str(caught.value)


def test_tiers_without_prefix_caching_are_refused(model, tmp_path):
    with pytest.raises(UserError) as caught:
        build_engine(model, num_blocks=8, kv_cache_dir=tmp_path, enable_prefix_caching=False)
    assert caught.value.param == "enable_prefix_caching", (
        "an option that would do nothing must not be accepted in silence"
    )


def test_the_cache_command_lists_verifies_and_clears(model, tmp_path, capsys):
    engine = with_tiers(model, tmp_path)
    answers(engine)
    engine.scheduler.manager.coordinator.connector.block_store.tiers.close()
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
