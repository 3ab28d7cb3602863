"""Course machinery. Conformance: config.json says to this engine what it says to transformers, in lessons 15 and 16.

Whatever field of ours transformers has too is compared, so that a new one is. `test_configs.py` has other families,
and what is refused.
"""

from dataclasses import fields

import pytest

from mini_engine.families.lfm3_config import Lfm3Config
from mini_engine.latents.latent_config import LatentConfig
from mini_engine.windows.window_config import WindowConfig
from tests.families.test_configs import FULL, SLIDING, config_of

FOUR = dict(num_hidden_layers=4, head_dim=16)
WINDOWS = FOUR | dict(use_sliding_window=True, sliding_window=7)
SMALL = dict(kv_lora_rank=24, q_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
DENSE = dict(num_key_value_heads="gone", first_k_dense_replace=3)
# as DeepSeek-V3's own config.json has it: `type`, and theta beside it
YARN = dict(type="yarn", factor=40, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096)
LITE = dict(mscale=0.707, mscale_all_dim=0.707)
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 9.0, "partial_rotary_factor": 0.3}
# written in another way, or of heads that latents do without
ON_THEIR_OWN = {"rope_scaling", "rope_interleave", "layer_types", "num_key_value_heads"}


def as_both_see(kind, folder, model_type, changes):
    """Return the config that transformers reads from these settings, and ours, after a look at a kind's fields."""
    from transformers import AutoConfig

    ours = config_of(folder, model_type, **changes)
    theirs = AutoConfig.from_pretrained(folder)
    assert isinstance(ours, kind), "the loader is chosen by what the config says"
    names = {one.name for one in fields(kind) if hasattr(theirs, one.name)} - ON_THEIR_OWN
    assert {name: getattr(ours, name) for name in names} == {name: getattr(theirs, name) for name in names}
    return theirs, ours


@pytest.mark.parametrize(
    "changes",
    [
        WINDOWS | dict(layer_types=[SLIDING, FULL, SLIDING, SLIDING]),
        WINDOWS | dict(layer_types=[SLIDING] * 4),
        WINDOWS | dict(max_window_layers=1),
        WINDOWS | dict(max_window_layers=0, layer_types=None),
        FOUR | dict(use_sliding_window=True, max_window_layers=3),
        WINDOWS | dict(sliding_window=2, layer_types=[FULL, SLIDING, FULL, FULL], max_window_layers=0),
    ],
    ids=str,
)
def test_windows(tmp_path, changes):
    theirs, ours = as_both_see(WindowConfig, tmp_path, "qwen3", changes)
    assert list(ours.layer_types) == theirs.layer_types


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(norm_eps=1e-3, head_dim=16, max_position_embeddings=77, tie_word_embeddings=False),
        dict(attention_bias=True, conv_bias=True, conv_L_cache=2, use_sandwich_norm=False, use_attention_gate=False),
        dict(layer_types=["conv", SLIDING, FULL, "conv", "conv"], sliding_window=9),
        dict(rope_parameters={FULL: {"rope_type": "default", "rope_theta": 7.0}, SLIDING: PROPORTIONAL}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_lfm3(tmp_path, changes):
    theirs, ours = as_both_see(Lfm3Config, tmp_path, "lfm3", dict(num_hidden_layers=5) | changes)
    assert list(ours.layer_types) == theirs.layer_types
    for name, rope in zip((FULL, SLIDING), ours.ropes, strict=True):
        given = {"partial_rotary_factor": 1.0, "factor": 1.0} | theirs.rope_parameters[name]
        assert rope._asdict() == given


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
        dict(model_type="youtu", eos_token_id=2, q_lora_rank=None, rope_interleave=False, rope_scaling=YARN),
        dict(model_type="deepseek_v2"),
        dict(model_type="deepseek_v2", q_lora_rank=None, rope_scaling=YARN | LITE),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_latents(tmp_path, changes):
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

    changes = {"model_type": "deepseek_v3"} | DENSE | changes
    theirs, ours = as_both_see(LatentConfig, tmp_path, changes.pop("model_type"), changes)
    assert ours.qk_head_dim == theirs.qk_head_dim
    assert ours.rope_interleave == (theirs.model_type == "deepseek_v2" or bool(theirs.rope_interleave))
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.attention_scale == pytest.approx(yarn_apply_mscale(theirs.rope_parameters, theirs.qk_head_dim**-0.5))
    ends = theirs.eos_token_id
    assert list(ours.eos_token_ids) == (ends if isinstance(ends, list) else [ends] if ends is not None else [])
