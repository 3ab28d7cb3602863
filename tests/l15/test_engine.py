"""Lesson 15. Every token equals Hugging Face's: batched, behind a prefix, and with holes where windows have been."""

import pytest

from mini_engine.assembly.layout import kv_shape
from mini_engine.base.errors import UserError
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.families.qwen3 import FAMILY as QWEN3
from tests.shared.windows import FAMILIES, checkpoint, engine_of
from tests.support import (
    ask,
    check_answers,
    check_no_block_is_lost,
    drain,
    refused,
    some_ids,
)

reference = pytest.mark.reference
nightly = pytest.mark.nightly
QUICK = ("SSFS", "SSS")  # these two show most; the others make a lesson's check take minutes
SELECTED = [family if family[0] in QUICK else pytest.param(family, marks=nightly) for family in FAMILIES.items()]
each_family = pytest.mark.parametrize("family", SELECTED, ids=lambda family: f"{family[0]}, W = {family[1]}")


def prompts_of(window):
    """Return prompts around the window's and the blocks' ends, the longest of more than three windows."""
    lengths = {1, 2, 7, window - 1, window, window + 1, 8, 9, 33, 3 * window + 5, 130}
    return [tuple(some_ids(length, 160, seed=length)) for length in sorted(lengths)]


def check(family, requests, when):
    return check_answers(requests, checkpoint(*family), when)


@each_family
def test_batched_and_then_behind_their_own_windows(family):
    engine, prompts = engine_of(*family), prompts_of(family[1])
    for when in ("batched", "behind a prefix"):
        requests = ask(engine, prompts, name=when)
        drain(engine)
        found = check(family, requests, when)
    expected = [(len(ids) - 1) // 8 * 8 for ids in prompts]
    assert found == expected, "a prompt that comes again begins at its last whole block"
    check_no_block_is_lost(engine)


@pytest.mark.parametrize("caching", [False, True])
def test_no_layer_reads_a_hole(caching):
    """The null block is filled with NaN after each step, padding rows or not."""
    family = ("SFSSF", 5)
    engine, prompts = engine_of(*family, chunk=9, budget=12, enable_prefix_caching=caching), prompts_of(5)
    requests = ask(engine, prompts)
    while engine.has_unfinished:
        for layer in (*engine.runner.pool.kv.K, *engine.runner.pool.kv.V):
            layer[0] = float("nan")
        engine.step()
    check(family, requests, "with NaN in the null block")


def test_more_requests_run_at_once_than_with_a_table_for_everything():
    """In the same memory, long prompts of a model with windows need a fraction of the blocks."""
    config = QWEN3.load(checkpoint("SSFS", 7)).config
    assert kv_shape(config).num_hidden_layers == 1
    engine = engine_of("SSFS", 7, chunk=16, num_blocks=1 + 240, max_num_seqs=32)
    ask(engine, [some_ids(170, 160, seed=seed) for seed in range(24)])
    running = engine.step().stats.num_running
    assert running >= 6, (
        "170 tokens fill 22 blocks of group 0; a window of 7 and a step of 16 touch at most 4 in each of three other "
        "groups. So a request needs 34. With 22 in every group, two requests would fill the pool"
    )


def test_a_request_that_can_never_fit_is_refused_with_what_its_windows_need():
    engine = engine_of("SSFS", 7, num_blocks=20)
    with refused(UserError, "28 8 19"):
        engine.add_request("r", some_ids(50, 160), SamplingParams(temperature=0, max_tokens=5))
