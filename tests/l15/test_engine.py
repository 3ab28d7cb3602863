"""Lesson 15. Every token equals Hugging Face's: batched, in chunks, preempted, behind a prefix or a tombstone."""

import random

import pytest
import torch

from mini_engine.assembly.layout import kv_shape
from mini_engine.base.errors import UserError
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.families.qwen3 import FAMILY as QWEN3
from tests.l15.models import FAMILIES, ask, check_nothing_is_lost, checkpoint, drain, engine_of, greedy, hugging_face
from tests.support import refused, some_ids

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
    for request in requests:
        want, got = greedy(*family, tuple(request.prompt_ids)), request.output_ids
        first = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
        assert got == want, (
            f"{when}: {len(request.prompt_ids)} prompt tokens, {request.num_cached_tokens} cached, "
            f"{request.num_preemptions} preemptions: the first other token is number {first} ({request.error})"
        )


@each_family
def test_batched_and_then_behind_their_own_windows(family):
    engine, prompts = engine_of(*family), prompts_of(family[1])
    first = ask(engine, prompts, name="cold")
    drain(engine)
    check(family, first, "batched")
    second = ask(engine, prompts, name="warm")
    drain(engine)
    check(family, second, "behind a prefix")
    expected = [(len(ids) - 1) // 8 * 8 for ids in prompts]
    assert [r.num_cached_tokens for r in second] == expected, "a prompt that comes again begins at its last whole block"
    check_nothing_is_lost(engine)


@reference
def test_the_window_changes_what_is_said():
    """Otherwise the tests above would pass with an engine that ignores it."""
    family = ("SSFS", 7)
    with_window = [greedy(*family, ids) for ids in prompts_of(7)]
    hf = hugging_face(*family)
    without = [greedy(family[0], 1000, ids) for ids in prompts_of(7)]
    assert hf.config.sliding_window == 7
    assert sum(a != b for a, b in zip(with_window, without, strict=True)) >= 5, "most answers differ"


@each_family
@pytest.mark.parametrize("chunk", ["1", "W", "W + 1", *(pytest.param(size, marks=nightly) for size in ("W - 1", "7"))])
def test_in_chunks_beside_decodes(family, chunk):
    size = max(1, eval(chunk, {"W": family[1]}))
    prompts = prompts_of(family[1]) if size > 1 else prompts_of(family[1])[:7]
    engine = engine_of(*family, chunk=size, budget=max(16, size))
    requests = ask(engine, prompts)
    drain(engine)
    check(family, requests, f"in chunks of {size}")
    check_nothing_is_lost(engine)


@pytest.mark.parametrize("caching", [False, True])
@each_family
def test_preempted_every_few_steps(family, caching):
    engine, chance = engine_of(*family, chunk=16, budget=24, enable_prefix_caching=caching), random.Random(0)
    requests = ask(engine, prompts_of(family[1]))
    while engine.has_unfinished:
        engine.step()
        if chance.random() < 0.3 and engine.scheduler.running:
            engine.scheduler.preempt(chance.choice(engine.scheduler.running))
    assert engine.scheduler.num_preemptions >= 3
    check(family, requests, "preempted")
    check_nothing_is_lost(engine)


@reference
@each_family
@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=nightly) for size in (1, 16))])
def test_any_block_size_in_a_pool_that_is_nearly_too_small(family, size):
    letters, window = family
    prompts = [ids for ids in prompts_of(window) if len(ids) <= 3 * window + 5][-5:]
    groups = len(letters) // max(1, letters.count("F")) + 1
    longest = -(-(max(map(len, prompts)) + 12) // size)
    engine = engine_of(*family, chunk=9, budget=12, block_size=size, num_blocks=2 + longest * (1 + groups))
    for name in ("cold", "warm"):
        requests = ask(engine, prompts, name=name)
        drain(engine)
        check(family, requests, f"{name}, blocks of {size}")
    check_nothing_is_lost(engine)


def test_behind_tombstones():
    family = ("SSFS", 7)
    engine, ids = engine_of(*family), tuple(some_ids(130, 160, seed=130))
    manager = engine.scheduler.manager
    memory = manager.coordinator.memory
    lengths = []
    for turn in range(6):
        [request] = ask(engine, [ids], name=f"turn {turn}")
        drain(engine)
        check(family, [request], f"with {turn} tombstones")
        lengths.append(request.num_cached_tokens)
        blocks = manager.coordinator.prefixes.tree.prefix(list(ids))
        memory.kept.drop(blocks[15 - 3 * turn])  # the last usable block, and blocks further and further ahead
    assert lengths[0] == 0 and lengths[1] == 120 and all(length > 100 for length in lengths[1:]), lengths
    check_nothing_is_lost(engine)


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


@reference
def test_aborts_leave_nothing_behind():
    family, chance = ("SSFS", 7), random.Random(1)
    engine = engine_of(*family, chunk=9, budget=16)
    requests = ask(engine, prompts_of(7) * 2)
    while engine.has_unfinished:
        engine.step()
        if chance.random() < 0.2 and engine.scheduler.requests:
            engine.abort(chance.choice(list(engine.scheduler.requests)))
    check(family, [request for request in requests if request.finish_reason == "length"], "beside aborts")
    check_nothing_is_lost(engine)


@reference
def test_a_step_that_fails_frees_the_windows_of_its_requests():
    engine = engine_of("SSFS", 7)
    [request] = ask(engine, [prompts_of(7)[-1]])
    engine.step()
    run, engine.runner.run = engine.runner.run, lambda chunks: 1 / 0
    engine.step()
    engine.runner.run = run
    assert request.finish_reason == "error"
    check_nothing_is_lost(engine)


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


@nightly
@pytest.mark.parametrize("backend", ["reference", "torch", "packed"])
@pytest.mark.parametrize("kernel", ["reference", "blockwise", "torch", "cpu"])
@each_family
def test_every_kernel_under_all_layers(family, kernel, backend):
    engine = engine_of(*family, kernel=kernel, backend=backend, chunk=33, budget=64)
    for name in ("cold", "warm"):
        requests = ask(engine, prompts_of(family[1]), name=name)
        drain(engine)
        check(family, requests, f"{name}, kernel {kernel}, {backend} layers")


@reference
@torch.inference_mode()
def test_logits_equal_hugging_faces():
    family, ids = ("SSFS", 7), some_ids(60, 160)
    engine = engine_of(*family, chunk=13, budget=16)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    request = engine.add_request("r", ids, params)
    drain(engine)
    theirs = hugging_face(*family)(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    expected = theirs[torch.arange(59), torch.tensor(ids[1:])]
    got = torch.tensor([one.chosen for one in request.prompt_logprobs])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
