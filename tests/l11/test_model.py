"""Lesson 11. The hybrid model's layers against Hugging Face's, and what a config.json may say."""

import json
import shutil

import pytest
import torch

from mini_engine.base.errors import UserError
from mini_engine.families.qwen3 import load_model
from mini_engine.families.qwen3_5 import FAMILY as QWEN3_5
from mini_engine.hybrid.hybrid_config import LINEAR, HybridConfig
from mini_engine.model.kinds import FULL, state_bytes
from tests.shared.hybrids import FAMILIES, checkpoint, first_logits
from tests.support import some_ids

FAMILY = "every fourth attends"
each_family = pytest.mark.parametrize("family", FAMILIES)


@each_family
@pytest.mark.parametrize("length", [1, 65, 130])
def test_logits_equal_hugging_face_s(family, length):
    ids = some_ids(length, 160, seed=length)
    ours, theirs = first_logits(family, ids)
    assert torch.allclose(ours, theirs, atol=2e-4), f"they differ by up to {(ours - theirs).abs().max():.2g}"


def test_bytes_of_a_token_and_of_a_state():
    config = HybridConfig.from_dir(checkpoint(FAMILY))
    assert config.layer_types == (LINEAR, LINEAR, LINEAR, FULL)
    assert config.kv_bytes_per_token(torch.float32) == 2 * 2 * 16 * 1 * 4, "only attention layers have K and V"
    assert state_bytes(config.layers, torch.float32) == 3 * (4 * 12 * 20 * 4 + 128 * 3 * 4)
    assert config.conv_dim == 2 * 2 * 12 + 4 * 20


def write_config(directory, **changes):
    raw = json.loads((checkpoint(FAMILY) / "config.json").read_text(encoding="utf-8"))
    raw = {name: value for name, value in (raw | changes).items() if value != "gone"}
    (directory / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return directory


MOE, PARTIAL = "qwen3_5_moe_text", "rope_parameters.partial_rotary_factor"
DEFAULT = {"rope_type": "default"}
BROKEN = {  # (changes, words that the sentence must have)
    "experts": ({"model_type": MOE}, ["experts", MOE]),
    "a number of experts": ({"num_experts": 8}, ["experts"]),
    "experts within": ({"model_type": "qwen3_5", "text_config": {"num_experts": 8}}, ["experts"]),
    "qwen3_next": ({"model_type": "qwen3_next"}, ["experts"]),
    "another family": ({"model_type": "llama"}, ["'llama'"]),
    "text_config 5": ({"model_type": "qwen3_5", "text_config": 5}, ["text_config = 5"]),
    "3 value heads on 2": ({"linear_num_value_heads": 3}, ["linear_num_value_heads = 3", "multiple"]),
    "16 key heads by default": ({"linear_num_key_heads": "gone"}, ["linear_num_key_heads = 16", "multiple"]),
    "3 query heads on 2": ({"num_attention_heads": 3}, ["num_attention_heads = 3", "multiple"]),
    "no key dimension": ({"linear_key_head_dim": 0}, ["linear_key_head_dim = 0"]),
    "a kernel of 0": ({"linear_conv_kernel_dim": 0}, ["linear_conv_kernel_dim = 0"]),
    "no hidden size": ({"hidden_size": "gone"}, ["hidden_size"]),
    "an odd head_dim": ({"head_dim": 15}, ["head_dim = 15"]),
    "a layer type too few": ({"layer_types": [LINEAR, LINEAR, FULL]}, ["3 layer_types for 4 layers"]),
    "a sliding layer": ({"layer_types": ["sliding_attention"] * 3 + [FULL]}, ["'sliding_attention'"]),
    "no attention": ({"layer_types": [LINEAR] * 4}, ["no attention layer"]),
    "an interval of 0": ({"layer_types": "gone", "full_attention_interval": 0}, ["full_attention_interval = 0"]),
    "an interval too long": ({"layer_types": "gone", "full_attention_interval": 5}, ["no attention layer"]),
    "a million layers": ({"layer_types": "gone", "num_hidden_layers": 10**6}, ["1000000", "hold 4 layers"]),
    "yarn": ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, ["'yarn'"]),
    "rotates nothing": ({"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.01}}, ["rotates 0"]),
    "rotates 3": ({"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.2}}, ["rotates 3"]),
    "rotates more than it has": ({"rope_parameters": DEFAULT | {"partial_rotary_factor": 1.5}}, [f"{PARTIAL} = 1.5"]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_run_is_refused_in_one_sentence(tmp_path, case):
    changes, words = BROKEN[case]
    shutil.copy(checkpoint(FAMILY) / "model.safetensors", write_config(tmp_path, **changes))
    with pytest.raises(UserError) as refused:
        QWEN3_5.load(tmp_path)
    said = str(refused.value)
    assert all(word in said for word in words) and "\n" not in said and len(said) < 600, said


def test_a_rope_theta_beside_the_rotation_is_read(tmp_path):
    """Older files have both settings at the top level."""
    old = dict(rope_parameters="gone", rope_theta=500.0, partial_rotary_factor=0.25)
    config = HybridConfig.from_dir(write_config(tmp_path, **old))
    assert config.rope_theta == 500.0 and config.rotary_dim == 4
    config = HybridConfig.from_dir(write_config(tmp_path, **old | {"rope_scaling": {"rope_theta": 70.0}}))
    assert config.rope_theta == 70.0 and config.rotary_dim == 4 and config.max_model_len == 2048


def test_a_quarter_of_a_head_is_rotated_unless_the_file_says_otherwise(tmp_path):
    from transformers import AutoConfig

    config = HybridConfig.from_dir(write_config(tmp_path, rope_parameters={"rope_type": "default"}))
    assert config.rotary_dim == 4, "a quarter of head_dim = 16"
    theirs = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert theirs["partial_rotary_factor"] == 0.25, "as transformers does"
    assert config.rope_theta == theirs.get("rope_theta", 10_000.0)


def test_an_interval_stands_for_layer_types(tmp_path):
    directory = write_config(tmp_path, layer_types="gone", full_attention_interval=2)
    assert HybridConfig.from_dir(directory).layer_types == (LINEAR, FULL, LINEAR, FULL)


def test_lesson_0_s_loader_points_to_what_runs_it():
    with pytest.raises(UserError) as refused:
        load_model(checkpoint(FAMILY))
    assert "LLM" in str(refused.value) and "\n" not in str(refused.value)
