"""Lesson 15. Shared by the tests: engines over random LFM3s, and what their answers must be."""

from typing import Any

from mini_engine.assembly.build import build_engine
from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.hybrid.memory import StateMemory
from mini_engine.kv.memories import Memories
from tests.l15.lfm3 import greedy, load
from tests.support import some_ids

NEW, SIZE = 12, 8
LENGTHS = (1, 7, 8, 9, 33, 64, 130)
PROMPTS = [tuple(some_ids(length, 160, seed=length)) for length in LENGTHS]
WHOLE = [(length - 1) // SIZE * SIZE for length in LENGTHS]
TIERS = {"kv_host_bytes": 2**28, "kv_always": True}
MIXED = "as published"  # states, windows and full layers
OPTIONS: dict[str, Any] = dict(
    num_blocks=600,
    block_size=SIZE,
    kernel="torch",
    backend="reference",
    checkpoint_interval=16,
    max_track_slots=60,
)


def engine_of(shape, chunk=64, budget=64, max_num_seqs=8, watermark=0.0, **options) -> Engine:
    """Return an engine over a random LFM3: blocks of 8 tokens, a checkpoint every 16."""
    limits = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(budget, max_num_seqs),
        chunked_prefill_size=chunk,
        watermark=watermark,
    )
    defaults = dict(
        num_blocks=600, block_size=SIZE, kernel="torch", backend="reference", checkpoint_interval=16, max_track_slots=60
    )
    return build_engine(load(shape), scheduler_config=limits, **defaults | options)


def ask(engine, prompts=PROMPTS, max_tokens=NEW, name="r", **params):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **params)
    return [engine.add_request(f"{name}{number}", list(ids), params) for number, ids in enumerate(prompts)]


def drain(engine, between=lambda: None):
    while engine.has_unfinished:
        engine.step()
        between()


def check(shape, requests, when):
    """Compare the answers; return how many tokens of each prompt were found in the cache."""
    for request in requests:
        want = greedy(shape, tuple(request.prompt_ids), request.params.max_tokens)
        assert request.output_ids == want, (
            f"{when}: {len(request.prompt_ids)} prompt tokens, {request.num_cached_tokens} cached, "
            f"{request.num_preemptions} preemptions: other tokens than Hugging Face's; {request.error}"
        )
    return [request.num_cached_tokens for request in requests]


def memories_of(engine):
    """Return the engine's memories: of states, and of windows, as far as it has them."""
    memory = engine.scheduler.manager.coordinator.memory
    return memory.memories if isinstance(memory, Memories) else [memory]


def check_nothing_is_lost(engine):
    manager = engine.scheduler.manager
    assert not manager.tables and manager.num_free_blocks == manager.num_usable_blocks, "blocks are lost"
    for memory in memories_of(engine):
        assert not memory.holds
        if isinstance(memory, StateMemory):
            assert len(memory.free_slots) == memory.states.max_reqs, "slots are lost"
