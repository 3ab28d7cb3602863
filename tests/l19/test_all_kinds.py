"""Lesson 19. All kinds of layers handed over: an LFM3's states and windows come with its blocks."""

import pytest

from mini_engine.assembly.build import open_engine
from mini_engine.assembly.engine_config import EngineConfig
from tests.l15.lfm3 import checkpoint
from tests.l15.mixed import MIXED, OPTIONS, WHOLE, ask, check, drain
from tests.l19.ends import check_nothing_is_held, events

pytestmark = pytest.mark.reference


@pytest.mark.nightly
def test_prompts_handed_over_by_a_prefill_worker():
    asked = EngineConfig(prefill_workers=1, handover_min_tokens=0, **OPTIONS)
    engine = open_engine(checkpoint(MIXED), asked, dtype="float32", device="cpu")
    try:
        requests = ask(engine)
        drain(engine)
        found = check(MIXED, requests, "handed over")
        assert found == WHOLE and events(engine)["transfers"] > 0, "states and windows come with the blocks"
        check_nothing_is_held(engine)
    finally:
        engine.runner.close()
