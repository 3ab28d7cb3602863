"""Lesson 16. Shared by the tests: random DeepSeek-V3 checkpoints, and Hugging Face's answers to compare with."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_engine.assembly.build import build_engine
from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.families.deepseek import FAMILY as DEEPSEEK
from tests.support import hf_greedy, some_ids

BLOCK, NEW = 8, 10
BASE: dict[str, Any] = dict(
    vocab_size=160,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=3,
    first_k_dense_replace=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=20,
    kv_lora_rank=24,
    qk_rope_head_dim=8,
    qk_nope_head_dim=12,
    v_head_dim=10,
    max_position_embeddings=2048,
    initializer_range=0.2,  # wide logit gaps; with the usual 0.02, rounding could decide the token
    bos_token_id=None,
    eos_token_id=None,
)
YARN = dict(rope_type="yarn", rope_theta=10_000.0, factor=8.0, original_max_position_embeddings=64)
# each family varies one thing, or two that do not meet
FAMILIES: dict[str, dict[str, Any]] = {
    "interleaved": {},
    "plain rotary, tied": dict(rope_interleave=False, tie_word_embeddings=True),
    "no latent of queries": dict(q_lora_rank=None),
    "biases": dict(attention_bias=True),
    "yarn": dict(rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=1.2)),
    "yarn without mscale, plain": dict(rope_parameters=YARN, rope_interleave=False, q_lora_rank=None),
    "wide values, six heads": dict(v_head_dim=30, num_attention_heads=6, num_key_value_heads=6, rms_norm_eps=1e-5),
}
FIRST = "interleaved"
LENGTHS = (1, 8, 9, 33, 130)
PROMPTS = [tuple(some_ids(length, 160, seed=length)) for length in LENGTHS]
LONG = PROMPTS[-1]
FOUND = [(length - 1) // BLOCK * BLOCK for length in LENGTHS]  # of a prompt that comes again
_KEEPERS: list[tempfile.TemporaryDirectory] = []


def has_kernel() -> bool:
    """Return whether the C++ kernel can be built here."""
    try:
        load_kernel("cpu", latents=True)
    except UserError:
        return False
    return True


needs_kernel = pytest.mark.skipif(not has_kernel(), reason="NOT CHECKED: the C++ kernel over latents; no compiler")
each_kernel = pytest.mark.parametrize("kernel", ["reference", "blockwise", pytest.param("cpu", marks=needs_kernel)])


def write(directory, **changes):
    """Write a random checkpoint with transformers, its norms and biases not the trivial ones."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    hf = DeepseekV3ForCausalLM(DeepseekV3Config(**BASE | changes))
    for name, parameter in hf.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            parameter.data.normal_(0, 0.2)
    hf.save_pretrained(directory)


@functools.cache
def checkpoint(family: str = FIRST) -> Path:
    """Return the checkpoint of one family, written once per run."""
    keeper = tempfile.TemporaryDirectory(prefix="kv-course-", ignore_cleanup_errors=True)
    write(keeper.name, **FAMILIES[family])
    _KEEPERS.append(keeper)  # removed when the test process ends
    return Path(keeper.name)


def load(family: str = FIRST, dtype=torch.float32):
    """Return our model, new each time: fast layers take over the weights."""
    return DEEPSEEK.load(checkpoint(family), dtype)


@functools.cache
def model():
    """Return our model of the first family, which no test changes."""
    return load()


@functools.cache
def hugging_face(family: str = FIRST):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint(family), dtype=torch.float32).eval()


@functools.cache
def greedy(prompt: tuple[int, ...], family: str = FIRST, max_tokens: int = NEW) -> list[int]:
    """Return Hugging Face's answer to a prompt on its own; each is computed once per run."""
    return hf_greedy(hugging_face(family), list(prompt), max_tokens)


def latents(family: str = FIRST, over=None, chunk=512, budget=512, **options):
    """Return an engine over a random model. What was never written is NaN."""
    limits = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=budget, chunked_prefill_size=chunk)
    defaults = {"num_blocks": 300, "block_size": BLOCK, "backend": "reference", "kernel": "torch"}
    chosen: dict[str, Any] = defaults | {"scheduler_config": limits} | options
    engine = build_engine(over or load(family), **chosen)
    pollute(engine)
    return engine


def pollute(engine, blocks: Any = slice(None)):
    """Fill blocks of an engine's pool with NaN; rows of int8 have none."""
    for layer in (*engine.runner.pool.kv.K, *engine.runner.pool.kv.V):
        if layer.is_floating_point():
            layer[blocks] = float("nan")


def ask(engine, prompts=PROMPTS, max_tokens=NEW, name="r", **params):
    """Add a greedy request for every prompt; the caller runs the steps."""
    chosen = SamplingParams(temperature=0, max_tokens=max_tokens, **params)
    return [engine.add_request(f"{name}{i}", list(ids), chosen) for i, ids in enumerate(prompts)]


def drain(engine):
    """Run steps until every request has ended."""
    while engine.has_unfinished:
        engine.step()


def check_answers(requests, when, family=FIRST, max_tokens=NEW):
    """Check that the requests have Hugging Face's answers; return how many prompt tokens each found."""
    for request in requests:
        assert not request.error, f"{when}: {request.error}"
        want = greedy(tuple(request.prompt_ids), family, max_tokens)
        assert request.output_ids == want, (
            f"{when}: other tokens than Hugging Face's for a prompt of {len(request.prompt_ids)}, of which "
            f"{request.num_cached_tokens} were cached, after {request.num_preemptions} preemptions"
        )
    return [request.num_cached_tokens for request in requests]


def answered(engine, when, prompts=PROMPTS, family=FIRST):
    """Ask, run and check; return how many prompt tokens each request found."""
    requests = ask(engine, prompts, name=when)
    drain(engine)
    return check_answers(requests, when, family)


def check_nothing_is_lost(engine):
    """Check that no block is held by a request that has ended."""
    manager = engine.scheduler.manager
    assert manager.blocks_by_state.held == 0, "blocks leaked"
    manager.coordinator.clear()
    assert manager.allocator.num_free == manager.num_usable_blocks, "with no request and no tree, all blocks are free"
