"""Lesson 18. Over two processes, everything that an engine does alone: fast layers, hybrids, tiers."""

import pytest

from mini_engine import LLM
from mini_engine.assembly.build import build_engine
from mini_engine.assembly.loading import load
from mini_engine.checkpoint.shipped import shipped_checkpoint
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.gpu.graphs import no_graph
from mini_engine.pocket import POCKET_DIR
from tests.l18.ranks import engine_over, started
from tests.l18.test_parallel import OPTIONS, PROMPTS, answers, nightly

POCKET_HYBRID_DIR = shipped_checkpoint("pocket-hybrid")


@nightly
@pytest.mark.parametrize("backend", ["reference", "torch", "packed"])
@pytest.mark.parametrize("path", [POCKET_DIR, POCKET_HYBRID_DIR], ids=["Qwen3", "hybrid"])
def test_every_backend_gives_the_tokens_of_one_process(path, backend):
    expected = answers(build_engine(load(path, "float32", "cpu"), **OPTIONS))
    with started(path, backend=backend) as ranks:
        engine = engine_over(ranks, **OPTIONS)
        for _ in range(2):
            assert answers(engine) == expected
        assert engine.scheduler.manager.coordinator.prefixes.stats.found_tokens > 0, (
            "the second time prefixes are shared"
        )


@nightly
def test_a_hybrid_over_two_ranks_does_what_a_hybrid_does():
    """Chunks, preemptions and few checkpoints: states are copied and reset all the time, in both ranks."""
    expected = answers(build_engine(load(POCKET_HYBRID_DIR, "float32", "cpu"), **OPTIONS), max_tokens=30)
    tight = {"num_blocks": 16, "block_size": 8, "max_track_slots": 2, "checkpoint_interval": 8}
    limits = {"scheduler_config": SchedulerConfig(watermark=0.0, chunked_prefill_size=5, max_num_seqs=4)}
    with started(POCKET_HYBRID_DIR) as ranks:
        for options in (OPTIONS, tight, tight | limits):
            engine = engine_over(ranks, **options)
            for _ in range(2):
                assert answers(engine, max_tokens=30) == expected, options
        engine = engine_over(ranks, capture=no_graph, **OPTIONS)
        assert answers(engine, max_tokens=30) == expected, "padded steps"


@nightly
@pytest.mark.parametrize("path", [POCKET_DIR, POCKET_HYBRID_DIR], ids=["Qwen3", "hybrid"])
def test_what_one_process_kept_on_a_disk_two_ranks_bring_back_and_the_other_way_round(path, tmp_path):
    def llm(num_ranks):
        return LLM(path, device="cpu", dtype="float32", tensor_parallel_size=num_ranks, **options)

    def ask(llm):
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        answers = [answer.token_ids for answer in llm.generate(PROMPTS, params, progress=False)]
        return answers, llm.engine.scheduler.manager.coordinator.connector.block_store

    options = OPTIONS | {"kv_cache_dir": tmp_path, "kv_always": True, "checkpoint_interval": 8}
    with llm(1) as one:
        expected, store = ask(one)
        assert store.saved_tokens > 0
    with llm(2) as two:
        found, store = ask(two)
        assert found == expected and store.restored_tokens > 0, "the records of one process"
    for file in tmp_path.rglob("*"):
        if file.is_file():
            file.unlink()
    with llm(2) as two:
        assert ask(two)[0] == expected
    with llm(1) as one:
        found, store = ask(one)
        assert found == expected and store.restored_tokens > 0, "the records of two ranks"
