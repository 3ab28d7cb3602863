"""Lesson 17. An engine with int8 or int4 K and V: bytes in the pool, layers that write there, blocks that move."""

from scripts.bench.kv_quality import heavy_tailed

import pytest

from lessons.l12_tiers.compact import compact, shrink
from mini_engine.__main__ import main
from mini_engine.assembly.build import build_engine
from mini_engine.assembly.loading import load
from mini_engine.base.errors import UserError
from mini_engine.engine.offline import generate_all
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.pocket import POCKET_DIR

pytestmark = pytest.mark.reference  # no task is about this

PROMPTS = [[(7 * i * start + i) % 150 + 3 for i in range(40)] for start in (1, 2, 3)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def model():
    """Return a random model: it shows what a trained one's wide margins would hide."""
    return heavy_tailed()[0]


@pytest.fixture(params=["int8", "int4"], scope="module")
def kv_dtype(request):
    return request.param


def engine_of(kv_dtype, num_blocks=60, **options):
    return build_engine(model(), backend="reference", num_blocks=num_blocks, kv_dtype=kv_dtype, **options)


def answers(engine, prompts=PROMPTS):
    return [done.token_ids for done in generate_all(engine, prompts, GREEDY, progress=False)]


@pytest.fixture(scope="module")
def cold(kv_dtype):
    """The answers to each prompt alone by the reference kernel, in an engine that shares and preempts nothing."""
    engine = engine_of(kv_dtype, enable_prefix_caching=False, kernel="reference")
    return [answers(engine, [prompt])[0] for prompt in PROMPTS]


def test_the_same_memory_holds_more_tokens():
    engines = [build_engine(model(), backend="reference", kv_bytes=2**20, kv_dtype=d) for d in ("auto", "int8", "int4")]
    full, int8, int4 = (engine.runner.pool.num_blocks for engine in engines)
    assert int8 > 3.5 * full, "a float32 model's K and V take 4 bytes a number; int8 takes one, and the scales"
    assert int4 > 6 * full, "int4 takes five bits a number"
    assert all(engine.runner.pool.bytes <= 2**20 for engine in engines)


def test_lesson_9s_layers_write_through_the_pool():
    """int8 only: layers round differently in their last bits, and 16 levels make more of that."""
    engine = build_engine(load(POCKET_DIR, "float32", "cpu"), num_blocks=60, kv_dtype="int8")
    plain = build_engine(load(POCKET_DIR, "float32", "cpu"), backend="reference", num_blocks=60, kv_dtype="int8")
    assert answers(engine) == answers(plain), "packed layers must not write floats over int8 rows"


def test_compaction_and_a_smaller_pool_in_mid_decode_change_no_token(kv_dtype, cold):
    engine = engine_of(kv_dtype)
    manager = engine.scheduler.manager
    answers(engine, [[9] * 70, [8] * 70])
    requests = [engine.add_request(str(i), prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]
    moved = 0
    while engine.has_unfinished:
        engine.step()
        manager.coordinator.prefixes.tree.evict(1)  # leaves a hole in front of the requests' blocks
        moved += compact(manager)
        if manager.allocator.num_blocks > 40:
            shrink(manager, engine.runner.pool, 40)
    assert [request.output_ids for request in requests] == cold
    assert moved and engine.runner.pool.num_blocks == 40


def test_another_dtype_is_refused_in_one_sentence():
    with pytest.raises(UserError) as caught:
        build_engine(model(), num_blocks=8, kv_dtype="int2")
    assert caught.value.param == "kv_dtype" and "int2" in str(caught.value)


def test_the_command_line_takes_the_option(kv_dtype, capsys):
    options = ["--kv-dtype", kv_dtype, "--max-tokens", "4", "--num-blocks", "20", "--backend", "reference"]
    assert main(["generate", "The capital of France is", *options]) == 0
    assert "Paris" in capsys.readouterr().out
