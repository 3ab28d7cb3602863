"""Lesson 16. Shared by the tests: random DeepSeek-V3 checkpoints, and a model of the first."""

import functools
from pathlib import Path
from typing import Any

from mini_engine.families.deepseek import FAMILY as DEEPSEEK
from tests import support
from tests.support import new_folder, some_ids

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


@functools.cache
def checkpoint(family: str = FIRST) -> Path:
    """Return the checkpoint of one family, written once per run."""
    return support.write_checkpoint(new_folder(), architecture="DeepseekV3", base=BASE, **FAMILIES[family])


def load():
    """Return our model of the first family, new each time: fast layers take over the weights."""
    return DEEPSEEK.load(checkpoint())


@functools.cache
def model():
    """Return our model of the first family, which no test changes."""
    return load()
