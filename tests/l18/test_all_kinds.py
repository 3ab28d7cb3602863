"""Lesson 18. All kinds of layers over ranks: each has its share of an LFM3's heads, channels, blocks and states."""

import pytest

from mini_engine.assembly.build import over_ranks
from mini_engine.assembly.choices import identity_of
from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.engine.scheduler_config import SchedulerConfig
from tests.l15.lfm3 import checkpoint, load
from tests.l15.mixed import MIXED, OPTIONS, TIERS, WHOLE, ask, check, check_nothing_is_lost, drain, engine_of
from tests.l18.ranks import started

pytestmark = pytest.mark.reference


@pytest.mark.nightly
def test_two_processes_give_hugging_face_s_tokens(tmp_path):

    with started(checkpoint(MIXED)) as ranks:
        for options in ({}, {"speculate": 4}, {"num_blocks": 60}, TIERS | {"kv_cache_dir": tmp_path}):
            limits = SchedulerConfig(watermark=0.0, chunked_prefill_size=16)
            config = EngineConfig(scheduler_config=limits, **OPTIONS | options)
            engine = over_ranks(ranks, config, identity_of(load(MIXED), config))
            for when in ("cold", "warm"):
                requests = ask(engine, name=when)
                drain(engine)
                found = check(MIXED, requests, f"{when}, over two ranks, {options}")
            assert found == WHOLE or "num_blocks" in options
            check_nothing_is_lost(engine)
        coordinator = engine.scheduler.manager.coordinator
        coordinator.clear()
        requests = ask(engine, name="back")
        drain(engine)
        assert check(MIXED, requests, "from host memory") == WHOLE, "each rank gets its share of blocks and states"
        coordinator.connector.block_store.tiers.close()
    alone = engine_of(MIXED, **TIERS, kv_cache_dir=tmp_path)
    requests = ask(alone, name="alone")
    drain(alone)
    assert check(MIXED, requests, "in one process") == WHOLE, "a record is the same whatever the number of ranks"
