"""Lesson 16. Which configs describe latents, as transformers reads them, and what is refused in one sentence."""

import json
import shutil

import pytest
import torch

from mini_engine.assembly.loading import reader_of
from mini_engine.base.errors import UserError
from mini_engine.checkpoint.shipped import shipped_checkpoint
from mini_engine.families.qwen3 import load_model
from mini_engine.latents.latent_config import LatentConfig
from tests.support import refused

pytestmark = pytest.mark.reference
BASE = dict(
    model_type="deepseek_v3",
    vocab_size=160,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
)
SMALL = dict(kv_lora_rank=24, q_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
# as DeepSeek-V3's own config.json has it: `type`, and theta beside it
YARN = dict(type="yarn", factor=40, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096)
LITE = dict(mscale=0.707, mscale_all_dim=0.707)
SAME = (
    *SMALL,
    "qk_head_dim",
    "rope_interleave",
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_bias",
    "head_dim",
)


def written(tmp_path, **changes):
    config = {name: value for name, value in (BASE | changes).items() if value != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


def read(path):
    """Return the config that the loader of any checkpoint reads."""
    return reader_of(path).shape(path)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        SMALL,
        dict(q_lora_rank=None),
        dict(q_lora_rank=None, rope_interleave=False, attention_bias=True, tie_word_embeddings=True),
        dict(num_key_value_heads=4, rms_norm_eps=1e-5, max_position_embeddings=99),
        dict(rope_scaling=YARN, rope_theta=50_000, max_position_embeddings=163_840),
        dict(rope_scaling=YARN | dict(mscale=0.7)),
        dict(rope_scaling=YARN | dict(mscale_all_dim=0)),
        dict(rope_scaling=dict(type="linear", factor=2.0)),
        dict(rope_parameters=dict(rope_type="default", rope_theta=7.0, mscale_all_dim=1.0)),
        dict(eos_token_id=[3, 5]),
        dict(eos_token_id=None),
        dict(first_k_dense_replace=9),
        dict(rope_interleave=None),
        dict(model_type="youtu", vocab_size=128_256),
        dict(
            model_type="youtu",
            eos_token_id=2,
            q_lora_rank=None,
            rope_interleave=False,
            rope_scaling=YARN,
            tie_word_embeddings=False,
        ),
        dict(model_type="deepseek_v2", first_k_dense_replace=3),
        dict(model_type="deepseek_v2", first_k_dense_replace=3, q_lora_rank=None, rope_scaling=YARN | LITE),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_settings_are_those_that_transformers_sees(tmp_path, changes):
    from transformers import AutoConfig
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

    path = written(tmp_path, **changes)
    theirs, ours = AutoConfig.from_pretrained(path), read(path)
    assert isinstance(ours, LatentConfig), "the loader is chosen by what the config says"
    theirs.rope_interleave = theirs.model_type == "deepseek_v2" or bool(theirs.rope_interleave)
    assert {name: getattr(ours, name) for name in SAME} == {name: getattr(theirs, name) for name in SAME}
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.attention_scale == pytest.approx(yarn_apply_mscale(theirs.rope_parameters, theirs.qk_head_dim**-0.5))
    ends = theirs.eos_token_id
    assert list(ours.eos_token_ids) == (ends if isinstance(ends, list) else [ends] if ends is not None else [])


def test_without_a_latent_of_queries_is_said_by_null_and_not_by_silence(tmp_path):
    assert read(written(tmp_path, q_lora_rank=None)).q_lora_rank is None
    assert read(written(tmp_path)).q_lora_rank == 1536


def test_every_head_has_a_key_of_its_own(tmp_path):
    for given in ("absent", None, 4):
        assert read(written(tmp_path, num_key_value_heads=given)).num_key_value_heads == 4


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        (dict(first_k_dense_replace=-1), "first_k_dense_replace -1"),
        (dict(num_key_value_heads=2), "num_key_value_heads 2 4"),
        (dict(rope_scaling=YARN | dict(type="linear")), "mscale_all_dim 'linear'"),
        (dict(quantization_config={"quant_method": "fp8"}), "quantiz"),
        (dict(model_type="deepseek_v32"), "'deepseek_v32' 'deepseek_v3'"),
        (dict(model_type="minicpm3", kv_lora_rank=256), "'minicpm3' 'deepseek_v3'"),
        (dict(kv_lora_rank=0), "kv_lora_rank 0 1"),
        (dict(q_lora_rank=0), "q_lora_rank 0"),
        (dict(qk_nope_head_dim="12"), "qk_nope_head_dim '12'"),
        (dict(qk_rope_head_dim=7), "qk_rope_head_dim 7 2"),
        (dict(hidden_act="gelu"), "hidden_act 'gelu'"),
        (dict(hidden_size="absent"), "hidden_size"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_run_is_refused_in_one_sentence(tmp_path, changes, values):
    path = written(tmp_path, **SMALL | changes)
    with refused(UserError, values):
        read(path)


def test_lesson_0_names_what_runs_it(tmp_path):
    with refused(UserError, "'deepseek_v3' LLM mini-engine"):
        load_model(written(tmp_path))


def test_a_token_takes_a_latent_and_a_rotary_key_in_each_layer(tmp_path):
    small = read(written(tmp_path, **SMALL))
    assert (small.k_shape, small.v_shape) == ((1, 24), (1, 8))
    assert small.kv_bytes_per_token(torch.bfloat16) == 3 * (24 + 8) * 2
    deepseek = read(written(tmp_path, num_hidden_layers=61, num_attention_heads=128, first_k_dense_replace=61))
    assert deepseek.kv_bytes_per_token(torch.bfloat16) == 61 * 576 * 2
    assert deepseek.max_model_len == 4096


@pytest.mark.parametrize("model", ["pocket", "pocket-hybrid", "pocket-windows", "pocket-latent"])
def test_every_family_reads_what_its_authors_would_sample_with(tmp_path, model):
    shutil.copytree(shipped_checkpoint(model), tmp_path / "model")
    authors = dict(temperature=0.6, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.1, max_new_tokens=5)
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(authors), encoding="utf-8")
    authors["max_tokens"] = authors.pop("max_new_tokens")
    assert read(tmp_path / "model").sampling == authors
