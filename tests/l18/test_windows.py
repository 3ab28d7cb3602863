"""Lesson 18. Windows over ranks: each has its heads of every group, and rank 0's tables."""

import pytest
import torch

from mini_engine.assembly.build import over_ranks
from mini_engine.assembly.choices import identity_of
from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.distributed.tensor_parallel.messages import PoolSize
from mini_engine.engine.runner import Step
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.gpu.graphs import no_graph
from mini_engine.windows.store import GroupedKv, GroupedMeta
from tests.l15.pocket import (
    LENGTHS,
    ask,
    check_answers,
    check_nothing_is_lost,
    directory,
    drain,
    model,
    windows,
)
from tests.l18.ranks import Wire, engine_over, follow, part, started
from tests.l18.test_steps import Noting

pytestmark = pytest.mark.reference
nightly = pytest.mark.nightly
WHOLE = [(length - 1) // 8 * 8 for length in LENGTHS]
OPTIONS = {"num_blocks": 200, "block_size": 8, "backend": "reference", "kernel": "torch"}


class NotingWindows(Noting):
    """As Noting, with pocket-windows."""

    def __init__(self):
        super().__init__()
        self.model = model()
        self.config = self.model.config


def with_tiers(ranks, **options):
    """Return an engine over ranks with tiers, which know the model by its whole weights."""
    config = EngineConfig(kv_host_bytes=2**28, kv_always=True, **OPTIONS | options)
    return over_ranks(ranks, config, identity_of(model(), config))


def answered(engine, when, **options):
    requests = ask(engine, name=when, **options)
    drain(engine)
    return check_answers(requests, when)


@pytest.mark.parametrize("capture", [None, no_graph], ids=["eager", "padded"])
def test_another_rank_has_the_windows_of_rank_0(capture):
    wire, other = Wire(model()), NotingWindows()
    engine = engine_over(wire, capture=capture, scheduler_config=SchedulerConfig(max_num_seqs=8), **OPTIONS)
    assert answered(engine, "cold") == [0, 0, 0, 0] and answered(engine, "warm") == WHOLE
    steps = [message for message in wire.sent if isinstance(message, Step)]
    assert all(isinstance(step.meta, GroupedMeta) for step in steps), "the tables of all groups reach the other ranks"
    follow(wire.sent, other)
    assert [type(pool) for pool in other.pools] == [GroupedKv]
    slots = torch.cat([step.meta.slot_mapping.flatten() for step in steps]).unique()
    slots = slots[slots >= 8]  # rows of padding write into the null block
    for mine, theirs in zip(engine.runner.pool.K, other.pools[0].K, strict=True):
        torch.testing.assert_close(mine.flatten(0, 1)[slots], theirs.flatten(0, 1)[slots])


def test_the_other_ranks_make_a_pool_of_one_group_s_layers():
    wire = Wire(part(directory(), 0, 2))
    pool = engine_over(wire, **OPTIONS).runner.pool
    [size] = [message for message in wire.sent if isinstance(message, PoolSize)]
    assert size.maker.config.num_hidden_layers == len(pool.K) == 2, "two full layers: blocks of two layers"
    assert size.maker.config.k_shape[0] == pool.K[0].shape[2] == 1, "and of a rank's share of the heads"


def test_tiers_over_ranks_carry_windows():
    wire, other = Wire(model()), NotingWindows()
    engine = with_tiers(wire)
    answered(engine, "cold")
    engine.scheduler.manager.coordinator.clear()
    assert answered(engine, "from the host") == WHOLE
    asked = [message for message in wire.sent if type(message).__name__ == "ReadBlocks"]
    assert asked, "rank 0 asks for the other ranks' parts of each block, windows included"
    assert follow(wire.sent, other), "which answer"


@nightly
def test_two_processes_give_hugging_face_s_tokens(tmp_path):
    with started(directory()) as ranks:
        engine = engine_over(ranks, num_blocks=300, block_size=8)
        assert 2 * engine.runner.pool.bytes == windows().runner.pool.bytes
        assert answered(engine, "cold") == [0, 0, 0, 0] and answered(engine, "warm") == WHOLE
        check_nothing_is_lost(engine)

        tight = SchedulerConfig(watermark=0.0, chunked_prefill_size=16)
        engine = engine_over(ranks, num_blocks=50, block_size=8, scheduler_config=tight)
        assert answered(engine, "in a small pool")[0] == 0
        check_nothing_is_lost(engine)

        limits = SchedulerConfig(max_num_seqs=8)
        engine = engine_over(ranks, capture=no_graph, num_blocks=300, block_size=8, scheduler_config=limits)
        answered(engine, "padded")

        engine = engine_over(ranks, num_blocks=300, block_size=8, speculate=4)
        answered(engine, "with guesses")
        check_nothing_is_lost(engine)

        engine = with_tiers(ranks, kv_cache_dir=tmp_path)
        answered(engine, "cold")
        engine.scheduler.manager.coordinator.clear()
        assert answered(engine, "from the host") == WHOLE, "each rank gets its heads of every group"
        engine.scheduler.manager.coordinator.connector.block_store.tiers.close()
    alone = windows(kv_cache_dir=tmp_path, kv_host_bytes=2**28, kv_always=True)
    assert answered(alone, "in one process") == WHOLE, "a record is the same whatever the number of ranks"
