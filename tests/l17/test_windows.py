"""Lesson 17. Engines whose groups of windows hold rows: the same answers by every path."""

import pytest

from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.gpu.graphs import no_graph
from mini_engine.quantized.formats import FORMATS
from tests.l15.pocket import PROMPTS, ask, check_nothing_is_lost, drain, windows

pytestmark = pytest.mark.reference  # no task is about this
TIERS = {"kv_host_bytes": 2**28, "kv_always": True}


def answers(kv_dtype, **options):
    """Return the answers of an engine over windows, cold and then warm."""
    engine, found = windows(kv_dtype=kv_dtype, **options), []
    for when in ("cold", "warm"):
        requests = ask(engine, name=when)
        drain(engine)
        assert not any(request.error for request in requests), requests[0].error
        found.append([request.output_ids for request in requests])
    check_nothing_is_lost(engine)
    return found


IN_CHUNKS = SchedulerConfig(chunked_prefill_size=16, watermark=0.0)


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kernel": "reference"},
        {"kernel": "cpu"},
        TIERS,
        {"speculate": 4},
        {"capture": no_graph},
        {"scheduler_config": IN_CHUNKS, "num_blocks": 60},
    ],
    ids=["torch", "reference", "cpu", "tiers", "guesses", "padded", "tight"],
)
def test_rows_in_groups_give_the_same_answers_by_every_path(kv_dtype, options):
    [cold, _] = answers(kv_dtype, enable_prefix_caching=False)
    assert answers(kv_dtype, **options) == [cold, cold]
    assert len(cold) == len(PROMPTS)
