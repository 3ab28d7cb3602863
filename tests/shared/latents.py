"""Lesson 16. Shared by the tests: random DeepSeek-V3 checkpoints, and engines over them."""

import functools
from pathlib import Path
from typing import Any

import torch

from mini_engine.families.deepseek import FAMILY as DEEPSEEK
from tests import support
from tests.support import new_folder, some_ids

BLOCK, NEW = 8, 10
BASE: dict[str, Any] = support.BASE | dict(
    first_k_dense_replace=3,
    num_key_value_heads=4,
    head_dim=8,  # the rotary part
    q_lora_rank=20,
    kv_lora_rank=24,
    qk_rope_head_dim=8,
    qk_nope_head_dim=12,
    v_head_dim=10,
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
check_nothing_is_lost = support.check_no_block_is_lost


@functools.cache
def checkpoint(family: str = FIRST) -> Path:
    """Return the checkpoint of one family, written once per run."""
    return support.write_checkpoint(new_folder(), architecture="DeepseekV3", base=BASE, **FAMILIES[family])


def load(family: str = FIRST, dtype=torch.float32):
    """Return our model, new each time: fast layers take over the weights."""
    return DEEPSEEK.load(checkpoint(family), dtype)


@functools.cache
def model():
    """Return our model of the first family, which no test changes."""
    return load()


def latents(family: str = FIRST, over=None, **options):
    """Return an engine over a random model. What was never written is NaN."""
    engine = support.small_engine(over or load(family), **{"max_num_seqs": 16, "num_blocks": 300} | options)
    for layer in (*engine.runner.pool.kv.K, *engine.runner.pool.kv.V):
        if layer.is_floating_point():  # rows of int8 have no NaN
            layer.fill_(float("nan"))
    return engine


def ask(engine, prompts=PROMPTS, max_tokens=NEW, name="r", **params):
    """Add a greedy request for every prompt; the caller runs the steps."""
    return support.ask(engine, prompts, max_tokens, name, **params)
