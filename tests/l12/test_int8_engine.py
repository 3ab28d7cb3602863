"""Lesson 12. An engine with int8 K and V: how close it is to full precision, and the same answers by every path."""

from scripts.bench.kv_quality import compare, heavy_tailed, held_out

import pytest

from mini_engine.__main__ import main
from mini_engine.build import build_engine
from mini_engine.engine.offline import generate_all
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import SchedulerConfig
from mini_engine.errors import UserError
from mini_engine.gpu.graphs import GraphRunner, no_graph
from mini_engine.loading import load
from mini_engine.pocket import POCKET_DIR
from mini_engine.tiers.compact import compact, shrink
from mini_engine.tiers.store import ALWAYS

pytestmark = pytest.mark.reference  # no task is about this

PROMPTS = [[(7 * i * start + i) % 150 + 3 for i in range(40)] for start in (1, 2, 3)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def model():
    """Return a random model: it shows what a trained one's wide margins would hide."""
    return heavy_tailed()[0]


def int8_engine(num_blocks=60, **options):
    return build_engine(model(), backend="reference", num_blocks=num_blocks, kv_dtype="int8", **options)


def answers(engine, prompts=PROMPTS):
    return [done.token_ids for done in generate_all(engine, prompts, GREEDY, progress=False)]


@pytest.fixture(scope="module")
def cold():
    """The answers of an int8 engine that shares, stores and preempts nothing."""
    return answers(int8_engine(enable_prefix_caching=False))


# ---------------------------------------------------------------- how close


@pytest.mark.parametrize(
    ("texts", "most_kl", "most_rise"),
    [(lambda: held_out(60), 1e-5, 2e-4), (heavy_tailed, 0.02, 0.02)],
    ids=["held out", "random"],
)
def test_int8_is_close_to_full_precision_and_int4_is_not(texts, most_kl, most_rise):
    """Measured: KL 1e-6 and 3e-4 on held-out text, 0.005 and 0.34 on a random model with an outlier channel."""
    found = compare(*texts())
    int8, int4 = (found[name] for name in ("int8", "int4"))
    full = found["full"].nll
    assert int8.kl < most_kl, f"KL {int8.kl:.2g}: is there one scale for each token and head?"
    assert abs(int8.nll - full) < most_rise, f"NLL rises from {full:.5f} to {int8.nll:.5f}"
    assert int4.kl > 5 * most_kl and int4.nll - full > most_rise, "a bound that int4 passes says nothing about int8"


def test_answers_are_int8s_own():
    engine = int8_engine()
    answers(engine)
    pool = engine.runner.pool
    assert pool.K[0].dtype.itemsize == 1 and pool.K[0].any(), "K and V are in the pool, as bytes"


# ---------------------------------------------------------------- the same answers by every path


def test_the_same_memory_holds_more_tokens():
    sizes = [build_engine(model(), backend="reference", kv_bytes=2**20, kv_dtype=d) for d in ("auto", "int8")]
    full, int8 = (engine.runner.pool.num_blocks for engine in sizes)
    assert int8 > 3.5 * full, "a float32 model's K and V take 4 bytes a number; int8 takes one, and the scales"
    assert sizes[1].runner.pool.bytes <= 2**20


@pytest.mark.parametrize("kernel", ["reference", "torch", "auto"])
def test_chunks_shared_prefixes_and_preemption_change_no_token(cold, kernel):
    limits = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=24, chunked_prefill_size=13, watermark=0.0)
    engine = int8_engine(num_blocks=10, scheduler_config=limits, kernel=kernel)
    assert answers(engine) == cold
    assert engine.scheduler.num_preemptions, "three prompts do not fit in 9 blocks, so one was preempted"
    again = int8_engine(kernel=kernel)
    assert answers(again) == answers(again) == cold
    assert again.scheduler.manager.prefixes.stats.found_tokens == 3 * 32, (
        "the second time, two blocks of each prompt are shared"
    )


def test_lesson_9s_layers_write_through_the_pool(cold):
    engine = build_engine(load(POCKET_DIR, "float32", "cpu"), num_blocks=60, kv_dtype="int8")
    plain = build_engine(load(POCKET_DIR, "float32", "cpu"), backend="reference", num_blocks=60, kv_dtype="int8")
    assert answers(engine) == answers(plain), "packed layers must not write floats over int8 rows"


def test_blocks_come_back_from_the_disk_and_from_the_host(cold, tmp_path):
    engines = []
    for _ in range(2):
        engine = int8_engine(kv_cache_dir=tmp_path)
        engine.scheduler.manager.connector.block_store.min_tokens = ALWAYS
        assert answers(engine) == cold, "a block from a tier must bring its scales with it"
        engine.scheduler.manager.prefixes.clear()
        assert answers(engine) == cold, "from the host tier, too"
        engine.scheduler.manager.connector.block_store.tiers.close()
        engines.append(engine.scheduler.manager.connector.block_store.traffic.restored_tokens)
    assert engines == [3 * 32, 2 * 3 * 32], "once from the host; after the restart from the disk as well"


@pytest.mark.parametrize(("first", "second"), [("int8", "auto"), ("auto", "int8")])
def test_a_cache_of_another_kv_dtype_is_never_served(tmp_path, first, second):
    expected = answers(build_engine(model(), backend="reference", num_blocks=60, kv_dtype=second))
    records = []
    for kv_dtype in (first, second):
        engine = build_engine(
            model(), backend="reference", num_blocks=60, kv_dtype=kv_dtype, kv_cache_dir=tmp_path, kv_host_bytes=2**22
        )
        engine.scheduler.manager.connector.block_store.min_tokens = ALWAYS
        found = answers(engine)
        engine.scheduler.manager.connector.block_store.tiers.close()
        records.append(len(list(tmp_path.glob("??/*.kv"))))
    assert records[1] == 2 * records[0], "each kind has keys of its own, so neither looks at the other's records"
    assert engine.scheduler.manager.connector.block_store.traffic.restored_tokens == 0, (
        f"{first} records were read as {second}"
    )
    assert found == expected


def test_compaction_and_a_smaller_pool_in_mid_decode_change_no_token(cold):
    engine = int8_engine()
    manager = engine.scheduler.manager
    answers(engine, [[9] * 70, [8] * 70])
    requests = [engine.add_request(str(i), prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]
    moved = 0
    while engine.has_unfinished:
        engine.step()
        manager.prefixes.tree.evict(1)  # leaves a hole in front of the requests' blocks
        moved += compact(manager)
        if manager.allocator.num_blocks > 40:
            shrink(manager, engine.runner.pool, 40)
    assert [request.output_ids for request in requests] == cold
    assert moved and engine.runner.pool.num_blocks == 40


# ---------------------------------------------------------------- what does not combine


def test_another_dtype_is_refused_in_one_sentence():
    with pytest.raises(UserError) as caught:
        build_engine(model(), num_blocks=8, kv_dtype="int4")
    assert caught.value.param == "kv_dtype" and "int4" in str(caught.value)


def test_captured_steps_read_int8_rows_too():
    eager, padded = int8_engine(), int8_engine(capture=no_graph)
    assert isinstance(padded.runner, GraphRunner)
    assert answers(padded) == answers(eager), "rows of padding must not change what the others read"


def test_the_command_line_takes_the_option(capsys):
    options = ["--kv-dtype", "int8", "--max-tokens", "4", "--num-blocks", "20", "--backend", "reference"]
    assert main(["generate", "The capital of France is", *options]) == 0
    assert "Paris" in capsys.readouterr().out
