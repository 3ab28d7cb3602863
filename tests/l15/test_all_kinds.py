"""Lesson 15. All kinds of layers in one model: an LFM3's tokens equal Hugging Face's, whatever its memories give up."""

import random

import pytest

from mini_engine.engine.engine import Engine
from mini_engine.engine.scheduler import Scheduler
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.gpu.graphs import no_graph
from mini_engine.hybrid.memory import StateMemory
from mini_engine.speculation.options import Speculation
from mini_engine.speculation.speculator import Speculator
from mini_engine.windows.memory import WindowMemory
from tests.l14.toys import Always
from tests.l15.lfm3 import SHAPES, greedy
from tests.l15.mixed import (
    LENGTHS,
    MIXED,
    NEW,
    PROMPTS,
    TIERS,
    WHOLE,
    ask,
    check,
    check_nothing_is_lost,
    drain,
    engine_of,
    memories_of,
)

pytestmark = pytest.mark.reference  # no task is about this; it imports transformers, which takes seconds
nightly = pytest.mark.nightly
each_shape = pytest.mark.parametrize(
    "shape", [name if name in (MIXED, "no full layer") else pytest.param(name, marks=nightly) for name in SHAPES]
)


@each_shape
def test_batched_and_then_behind_their_own_prefixes(shape):
    engine = engine_of(shape)
    for when, found in (("cold", [0] * len(LENGTHS)), ("warm", WHOLE)):
        requests = ask(engine, name=when)
        drain(engine)
        assert check(shape, requests, when) == found, "a prompt that comes again begins at its last whole block"
    check_nothing_is_lost(engine)


def test_a_model_of_all_kinds_has_a_memory_for_each():
    states, windows = memories_of(engine_of(MIXED))
    assert isinstance(states, StateMemory) and isinstance(windows, WindowMemory)


@each_shape
def test_alone(shape):
    engine = engine_of(shape, enable_prefix_caching=False)
    for number, prompt in enumerate(PROMPTS):
        requests = ask(engine, [prompt], name=f"alone {number}, ")
        drain(engine)
        assert check(shape, requests, "alone") == [0]


@each_shape
@pytest.mark.parametrize("size", [1, 7, "W - 1", "W", "W + 1"])
def test_in_chunks_beside_decodes(shape, size):
    if isinstance(size, str):
        size = max(1, SHAPES[shape][1] + {"W - 1": -1, "W": 0, "W + 1": 1}[size])
    engine = engine_of(shape, chunk=size, budget=max(16, size))
    for when in ("cold", "warm"):
        requests = ask(engine, PROMPTS if size > 1 else PROMPTS[:5], name=when)
        drain(engine)
        check(shape, requests, f"{when}, in chunks of {size}")
    check_nothing_is_lost(engine)


@each_shape
@pytest.mark.parametrize("caching", [False, True])
def test_preempted_every_few_steps(shape, caching):
    engine, chance = engine_of(shape, chunk=16, budget=24, enable_prefix_caching=caching), random.Random(0)

    def preempt():
        if chance.random() < 0.3 and engine.scheduler.running:
            engine.scheduler.preempt(chance.choice(engine.scheduler.running))

    requests = ask(engine)
    drain(engine, preempt)
    assert engine.scheduler.num_preemptions >= 3
    check(shape, requests, "preempted")
    check_nothing_is_lost(engine)


@pytest.mark.parametrize("gone", ["states", "windows", "both"])
def test_behind_a_prefix_whose_state_or_window_is_gone(gone):
    """From the end on, what one memory has of the prefix is dropped place by place: the hit is what all still have."""
    engine, prompt, lengths = engine_of(MIXED), PROMPTS[-1], []
    states, windows = memories_of(engine)
    tree = engine.scheduler.manager.coordinator.prefixes.tree
    for turn in range(8):
        requests = ask(engine, [prompt], name=f"turn {turn}, ")
        drain(engine)
        lengths += check(MIXED, requests, f"{turn} places gone")
        blocks = tree.prefix(list(prompt[: WHOLE[-1]]))
        if gone in ("states", "both") and (path := [n for n in tree.path(list(prompt)) if n in states.checkpoints]):
            states.checkpoints.drop(path[turn % len(path)])
        if gone in ("windows", "both"):
            windows.kept.drop(blocks[-1 - 2 * turn % len(blocks)])
    assert lengths[0] == 0 < lengths[1] and len(set(lengths)) > 2, f"{lengths}: hits get shorter and come back"
    check_nothing_is_lost(engine)


@each_shape
@pytest.mark.parametrize("caching", [False, True])
def test_no_layer_reads_a_hole(shape, caching):
    engine = engine_of(shape, chunk=9, budget=12, enable_prefix_caching=caching)
    pool = engine.runner.pool
    while hasattr(pool, "kv"):
        pool = pool.kv
    requests = ask(engine)
    while engine.has_unfinished:
        for layer in (*pool.K, *pool.V):
            layer[0] = float("nan")
        engine.step()
    check(shape, requests, "with NaN in the null block")


@pytest.mark.parametrize(
    "options",
    [{}, {"enable_prefix_caching": False}, TIERS, {"capture": no_graph}],
    ids=["cached", "uncached", "tiers", "padded"],
)
def test_a_pool_that_is_too_small_preempts_and_changes_no_token(options):
    engine = engine_of(MIXED, chunk=16, num_blocks=60, **options)
    requests = ask(engine, max_tokens=40)
    drain(engine)
    check(MIXED, requests, "preempted")
    assert engine.scheduler.num_preemptions > 0, "the pool was to be too small for all of them"
    check_nothing_is_lost(engine)


@pytest.mark.parametrize("slots", [0, 8])
def test_few_checkpoints_cost_hits_and_change_no_token(slots):
    engine = engine_of(MIXED, max_track_slots=slots)
    for when in ("cold", "warm"):
        requests = ask(engine, name=when)
        drain(engine)
        found = check(MIXED, requests, when)
    assert (sum(found) > 0) == (slots > 0)
    check_nothing_is_lost(engine)


@each_shape
def test_padded_steps(shape):
    engine = engine_of(shape, capture=no_graph)
    for when in ("cold", "warm"):
        requests = ask(engine, name=when)
        drain(engine)
        check(shape, requests, when)
    check_nothing_is_lost(engine)


@each_shape
def test_guesses_leave_no_trace(shape):
    """The drafter knows Hugging Face's answers and is wrong now and then."""
    speculation, limits = Speculation(4), SchedulerConfig(max_num_seqs=8, chunked_prefill_size=16)
    built = engine_of(shape, speculate=speculation)

    def guess(request, count):
        at, answer = len(request.output_ids), greedy(shape, tuple(request.prompt_ids), 24)
        return [token if random.Random(at + i).random() < 0.7 else 1 for i, token in enumerate(answer[at : at + count])]

    scheduler = Scheduler(built.scheduler.manager, limits)
    engine = Engine(built.config, scheduler, built.runner, Speculator(speculation, Always(guess)))
    for when in ("cold", "warm"):
        requests, drafted, accepted = ask(engine, max_tokens=24, name=when), 0, 0
        while engine.has_unfinished:
            stats = engine.step().stats
            drafted, accepted = drafted + stats.num_drafted, accepted + stats.num_accepted
        check(shape, requests, f"{when}, with guesses")
        assert drafted > accepted > 0, "this test wants guesses of both kinds"
    check_nothing_is_lost(engine)


@each_shape
def test_back_from_the_tiers_and_after_a_restart(shape, tmp_path):
    options = TIERS | {"kv_cache_dir": tmp_path}
    engine = engine_of(shape, **options)
    cold = ask(engine, name="cold")
    drain(engine)
    check(shape, cold, "cold")
    engine.scheduler.manager.coordinator.clear()
    back = ask(engine, name="back")
    drain(engine)
    assert check(shape, back, "from host memory") == WHOLE
    check_nothing_is_lost(engine)
    engine.scheduler.manager.coordinator.connector.block_store.tiers.close()
    again = engine_of(shape, **options)
    requests = ask(again, name="again")
    drain(again)
    assert check(shape, requests, "after a restart") == WHOLE
    check_nothing_is_lost(again)


def test_a_record_of_a_window_or_state_that_is_gone_shortens_what_comes_back():
    engine, chance, lengths = engine_of(MIXED, **TIERS), random.Random(0), []
    coordinator = engine.scheduler.manager.coordinator
    tiers = coordinator.connector.block_store.tiers
    for turn in range(8):
        requests = ask(engine, [PROMPTS[-1]], name=f"turn {turn}, ")
        drain(engine)
        lengths += check(MIXED, requests, f"turn {turn}")
        coordinator.clear()
        for key in chance.sample(list(tiers.host.records), 2):
            del tiers.host.records[key]
    assert len({*lengths, 0, WHOLE[-1]}) > 2, f"{lengths}: what is left of the records is of use"
    check_nothing_is_lost(engine)


def test_aborts_leave_nothing_behind():
    engine, chance = engine_of(MIXED, chunk=9, budget=16), random.Random(1)
    requests = ask(engine, PROMPTS * 3)

    def abort():
        if chance.random() < 0.2 and engine.scheduler.requests:
            engine.abort(chance.choice(list(engine.scheduler.requests)))

    drain(engine, abort)
    whole = [request for request in requests if request.finish_reason == "length"]
    check(MIXED, whole, "beside aborts")
    assert 0 < len(whole) < len(requests)
    check_nothing_is_lost(engine)


@nightly
@each_shape
@pytest.mark.parametrize("kernel", ["reference", "blockwise", "cpu"])
@pytest.mark.parametrize("backend", ["torch", "packed"])
def test_every_kernel_under_fast_layers(shape, kernel, backend):
    engine = engine_of(shape, kernel=kernel, backend=backend, chunk=33)
    for when in ("cold", "warm"):
        requests = ask(engine, name=when)
        drain(engine)
        check(shape, requests, f"{when}, kernel {kernel}, {backend} layers")


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_rows_of_few_bits_answer_the_same_cold_and_warm(kv_dtype):
    """What is cached is what was computed, so a warm answer is the cold one; int8's first tokens are Hugging Face's."""
    engine, answers = engine_of(MIXED, kv_dtype=kv_dtype), []
    for when in ("cold", "warm"):
        requests = ask(engine, name=when)
        drain(engine)
        answers.append([request.output_ids for request in requests])
    assert answers[0] == answers[1]
    if kv_dtype == "int8":
        first = [greedy(MIXED, prompt, NEW)[0] for prompt in PROMPTS]
        assert [output[0] for output in answers[0]] == first
    check_nothing_is_lost(engine)
