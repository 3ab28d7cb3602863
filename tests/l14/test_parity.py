"""Lesson 14. Tokens equal Hugging Face's at any k, whatever is guessed: in chunks, preempted, cached."""

import functools
import random

from scripts.l14_smoke import PROMPTS

import pytest

from mini_engine.assembly.build import build_engine
from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.families.qwen3 import load_model
from mini_engine.kv.cache_coordinator import caching_manager
from mini_engine.kv.manager import KvCacheManager
from mini_engine.pocket import POCKET_DIR
from mini_engine.speculation.options import Speculation
from mini_engine.speculation.speculator import Speculator
from mini_engine.text.tokenizer import Tokenizer
from tests.l14.toys import ANY_LOAD, Always, drain
from tests.support import both, hf_greedy, some_ids

FAMILY = "two, tied, wide heads"
LENGTHS = [1, 7, 16, 33]
NEW = 20


@functools.cache
def prompt_and_answer(family, length):
    """Return a prompt and Hugging Face's answer to it alone."""
    _, hf = both(family)
    prompt = some_ids(length, hf.config.vocab_size, seed=length)
    return prompt, hf_greedy(hf, prompt, NEW)


def mostly_right(family):
    """Return a drafter that knows Hugging Face's answers and is wrong now and then, always at the same places."""

    def guess(request, count):
        _, answer = prompt_and_answer(family, len(request.prompt_ids))
        at = len(request.output_ids)
        right = answer[at : at + count]
        return [token if random.Random(at + i).random() < 0.7 else 1 for i, token in enumerate(right)]

    return Always(guess)


def engine_for(k=5, family=FAMILY, num_blocks=64, block_size=8, kernel="torch", manager=caching_manager, **limits):
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "watermark": 0} | limits
    engine = Engine.for_model(
        both(family)[0], num_blocks=num_blocks, block_size=block_size, kernel=kernel, manager=manager,
        scheduler_config=SchedulerConfig(**limits),
        decoding=Speculator(Speculation(k, max_rows=ANY_LOAD), mostly_right(family)),
    )  # fmt: skip
    for tensor in (*engine.runner.pool.K, *engine.runner.pool.V):
        tensor.fill_(float("nan"))  # the null block and every unwritten slot
    return engine


def check(engine, lengths=LENGTHS, family=FAMILY, together=True):
    """Run the prompts and compare; return how many guesses were accepted and how many were not."""
    accepted, drafted, params = 0, 0, SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    for group in [lengths] if together else [[length] for length in lengths]:
        asked = {n: engine.add_request(str(n), prompt_and_answer(family, n)[0], params) for n in group}
        stats = drain(engine)
        accepted, drafted = accepted + sum(s.num_accepted for s in stats), drafted + sum(s.num_drafted for s in stats)
        for length, request in asked.items():
            want = prompt_and_answer(family, length)[1]
            assert request.output_ids == want, f"the answer to the prompt of {length} tokens differs; {request.error}"
    assert accepted and drafted > accepted, "this test wants guesses of both kinds"
    assert engine.scheduler.manager.blocks_by_state.held == 0


@pytest.mark.parametrize("k", range(1, 9))
def test_at_any_k(k):
    check(engine_for(k))


@pytest.mark.parametrize("size", [1, 3, 8])
def test_beside_prompts_in_chunks(size):
    check(engine_for(max_num_batched_tokens=22, chunked_prefill_size=size))


@pytest.mark.parametrize("manager", [KvCacheManager, caching_manager])
def test_in_a_pool_so_small_that_requests_are_preempted(manager):
    engine = engine_for(num_blocks=1 + 9, manager=manager)
    check(engine)
    assert engine.scheduler.num_preemptions, "the pool should be too small for all"


def test_behind_a_cached_prefix():
    engine = engine_for()
    check(engine)
    check(engine)
    assert engine.scheduler.manager.coordinator.prefixes.stats.num_hits


@pytest.mark.parametrize("kernel", ["reference", "torch", "cpu"])
def test_with_every_attention_kernel_of_a_cpu(kernel):
    try:
        load_kernel(kernel)
    except UserError as why:
        pytest.skip(str(why))
    check(engine_for(kernel=kernel))


# ---------------------------------------------------------------- the pocket model, whose answers repeat what was said


@functools.cache
def pocket(backend):
    """Return the pocket model's prompts in tokens, and its answers without guesses."""
    prompts = [Tokenizer(POCKET_DIR).encode(text) for text in PROMPTS]
    return prompts, pocket_answers(prompts, backend, None)[0]


def pocket_answers(prompts, backend, speculate, **changes):
    params = SamplingParams(**{"temperature": 0, "max_tokens": 24, "seed": 5} | changes)
    engine = build_engine(load_model(POCKET_DIR), backend=backend, num_blocks=128, speculate=speculate)
    requests = [engine.add_request(str(i), ids, params) for i, ids in enumerate(prompts)]
    stats = drain(engine)
    return [request.output_ids for request in requests], sum(one.num_accepted for one in stats)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_the_pocket_models_answers_are_the_same_and_many_guesses_are_accepted(k):
    prompts, want = pocket("reference")
    found, accepted = pocket_answers(prompts, "reference", Speculation(k, max_rows=ANY_LOAD))
    assert found == want
    assert accepted > 40, "questions asked twice, numbers and weekdays: most of these tokens occurred before"


def test_a_seed_gives_the_pocket_model_the_same_answer_with_guesses():
    prompts, _ = pocket("reference")
    warm = dict(temperature=0.8, top_p=0.95)
    want, _ = pocket_answers(prompts, "auto", None, **warm)
    found, accepted = pocket_answers(prompts, "auto", Speculation(max_rows=ANY_LOAD), **warm)
    assert found == want and accepted
