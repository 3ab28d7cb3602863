"""Course machinery. What config.json may say in families after lesson 0's: older layouts, defaults and mistakes.

Protects readers from a checkpoint that loads and then answers as another model would.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_engine.assembly.loading import load
from mini_engine.base.errors import UserError
from mini_engine.checkpoint.shipped import shipped_checkpoint
from mini_engine.engine.engine import Engine
from mini_engine.families import family_of
from mini_engine.families.qwen3 import load_model
from mini_engine.model.kinds import Full, State, Window
from tests.support import refused

SHAPE = dict(vocab_size=160, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4)
ATTENDS = dict(full_attention_interval=3, num_key_value_heads=2)  # of three layers, Qwen3.5's last
MLA = dict(num_key_value_heads="gone", first_k_dense_replace=3)  # latents, and no experts
MOE = MLA | dict(first_k_dense_replace=1, n_routed_experts=8, num_experts_per_tok=2, n_group=4)
LATENT = dict(kv_lora_rank=24, q_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = dict(use_sliding_window=True, sliding_window=7, head_dim=16)
SLIDES = dict(WINDOW, layer_types=[SLIDING, FULL, SLIDING])
LFM3 = dict(num_hidden_layers=5, head_dim=16, sliding_window=7)
CONV = State((((48, 6), None),))
KINDS = (CONV, Full(), Window(7), CONV, CONV)


def config_of(folder: Path, model_type: str, **changes: Any) -> Any:
    """Return the shape that a config.json with these settings describes; one that is "gone" is left out."""
    raw = SHAPE | dict(model_type=model_type, num_key_value_heads=2) | changes
    raw = {name: value for name, value in raw.items() if value != "gone"}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return family_of(raw, folder / "config.json").shape(folder)


@pytest.mark.parametrize(
    ("model_type", "changes", "fields"),
    [
        ("llama", dict(num_key_value_heads="gone"), dict(num_key_value_heads=4, head_dim=12, attention_bias=False)),
        ("llama", dict(eos_token_id=None), dict(eos_token_ids=())),
        ("llama", {}, dict(eos_token_ids=(2,), max_position_embeddings=2048)),
        ("llama", dict(attention_bias=True), dict(attention_bias=True, output_bias=True)),
        ("qwen2", dict(attention_bias=False), dict(attention_bias=True, output_bias=False, eos_token_ids=())),
        ("qwen2", dict(use_sliding_window=False, sliding_window=7), dict(layers=(Full(),) * 3)),
        ("qwen2", dict(use_sliding_window=True, max_window_layers=2), dict(layers=(Full(), Full(), Window(4096)))),
        ("mistral", {}, dict(layers=(Window(4096),) * 3, max_position_embeddings=131_072)),
        ("mistral", dict(sliding_window=None), dict(layers=(Full(),) * 3)),
        ("gemma3_text", {}, dict(head_dim=256, tie_word_embeddings=True, query_scale=1.0, eos_token_ids=(1,))),
        ("gemma3_text", dict(sliding_window_pattern=2), dict(layers=(Window(4096), Full(), Window(4096)))),
        ("gemma3_text", dict(head_dim=64), dict(query_scale=0.5)),
        ("qwen3_moe", {}, dict(num_experts=128, num_experts_per_tok=8, norm_topk_prob=False, head_dim=12)),
        ("qwen3_moe", dict(num_local_experts=9, mlp_only_layers=[1]), dict(routed_experts=9, mlp_only_layers=(1,))),
        ("qwen3_moe", dict(sliding_window=7, mlp_only_layers=None), dict(layers=(Full(),) * 3)),
        ("qwen3_moe", dict(use_sliding_window=True), dict(layers=(Window(4096),) * 3)),
        ("qwen3_moe", dict(use_sliding_window=True, sliding_window=None), dict(layers=(Full(),) * 3)),
        ("qwen3_5_moe_text", ATTENDS, dict(num_experts=256, num_experts_per_tok=8, intermediate_size=512)),
        ("qwen3_5_moe", dict(text_config=SHAPE | ATTENDS | dict(num_experts=8)), dict(routed_experts=8)),
        ("youtu_llm", MLA, dict(rope_interleave=True, tie_word_embeddings=True, eos_token_ids=(), head_dim=64)),
        ("youtu_llm", MLA | dict(vocab_size=128_256), dict(eos_token_ids=(128_001,), max_position_embeddings=131_072)),
        ("deepseek_v2", MLA | dict(rope_interleave=False), dict(rope_interleave=True, eos_token_ids=(2,))),
        ("deepseek_v2", MLA | dict(q_lora_rank=None), dict(q_lora_rank=None, max_position_embeddings=2048)),
        ("deepseek_v2", MLA | dict(first_k_dense_replace=1, n_routed_experts=None), dict(routed_experts=0)),
        ("youtu", MLA | dict(first_k_dense_replace=0), dict(routed_experts=0)),
        ("deepseek_v2", MOE | dict(n_group=4, topk_group=2), dict(n_group=1, topk_group=1, shared_size=2 * 1407)),
        ("deepseek_v3", MOE, dict(n_group=4, shared_size=2048, routed_scaling_factor=2.5, norm_topk_prob=True)),
        ("deepseek_v3", MLA | LATENT, dict(k_shape=(1, 24), v_shape=(1, 8), num_key_value_heads=4)),
        ("deepseek_v3", MLA | dict(num_key_value_heads=None), dict(num_key_value_heads=4, max_model_len=4096)),
        ("deepseek_v3", MLA | dict(num_key_value_heads=4), dict(num_key_value_heads=4)),
        ("lfm3", LFM3 | dict(layer_types=["conv", FULL, SLIDING, "conv", "conv"]), dict(layers=KINDS)),
        ("qwen3", dict(WINDOW, layer_types=[FULL] * 3), dict(layers=(Full(),) * 3)),
        ("qwen3", dict(WINDOW, max_window_layers=3), dict(layers=(Full(),) * 3)),
        ("qwen3", dict(WINDOW, sliding_window=None, max_window_layers=0), dict(layers=(Full(),) * 3)),
        ("qwen3", dict(WINDOW, use_sliding_window=False, max_window_layers=0), dict(layers=(Full(),) * 3)),
    ],
)
def test_settings_mean_what_they_mean_in_transformers(tmp_path, model_type, changes, fields):
    config = config_of(tmp_path, model_type, **changes)
    assert {name: getattr(config, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("model_type", "layers", "heads"), [("youtu_llm", 32, 16), ("deepseek_v2", 27, 16), ("deepseek_v3", 61, 128)]
)
def test_youtu_and_deepseek_keep_576_numbers_a_token_in_each_layer(tmp_path, model_type, layers, heads):
    sizes = dict(num_hidden_layers=layers, num_attention_heads=heads, first_k_dense_replace=layers)
    config = config_of(tmp_path, model_type, **MLA | sizes)
    assert config.kv_bytes_per_token(torch.bfloat16) == layers * 576 * 2


@pytest.mark.parametrize("changes", [{}, dict(rope_theta=5e5, rope_local_base_freq=2e4)])
@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 8.0}])
def test_both_layouts_of_gemma_s_angles_mean_the_same(tmp_path, changes, scaling):
    old = config_of(tmp_path, "gemma3_text", rope_scaling=scaling, **changes)
    full = {"rope_theta": changes.get("rope_theta", 1e6), **(scaling or {"rope_type": "default"})}
    sliding = {"rope_theta": changes.get("rope_local_base_freq", 1e4), "rope_type": "default"}
    assert old.ropes == config_of(tmp_path, "gemma3_text", rope_parameters={FULL: full, SLIDING: sliding}).ropes
    assert [rope.rope_theta for rope in old.ropes] == [full["rope_theta"], sliding["rope_theta"]]
    assert old.ropes[0].factor == (8.0 if scaling else 1.0) and old.ropes[1].factor == 1.0


@pytest.mark.parametrize(
    ("model_type", "changes", "words"),
    [
        ("llama", dict(mlp_bias=True), "mlp_bias"),
        ("llama", dict(num_attention_heads=5, num_key_value_heads=5), "hidden_size = 48 num_attention_heads = 5"),
        ("llama", dict(num_attention_heads="gone"), "num_attention_heads"),
        ("llama", dict(num_key_value_heads=3), "num_attention_heads = 4 num_key_value_heads = 3"),
        ("llama", dict(hidden_act="gelu"), "'gelu'"),
        ("llama", dict(quantization_config={"quant_method": "gptq"}), "quantization_config"),
        ("qwen2", dict(layer_types=[FULL]), "1 layer_types 3"),
        ("mistral", dict(sliding_window=1), "sliding_window = 1"),
        ("mistral", dict(rope_scaling={"rope_type": "longrope"}), "'longrope'"),
        ("gemma3_text", dict(final_logit_softcapping=30.0), "final_logit_softcapping"),
        ("gemma3_text", dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
        ("gemma3_text", dict(hidden_activation="silu"), "'silu'"),
        ("gemma3_text", dict(rope_parameters={FULL: 5}), "rope_parameters.full_attention = 5"),
        ("gemma3_text", dict(rope_scaling={"rope_type": "yarn", "factor": 2.0}), "rope_scaling.rope_type"),
        ("gemma3_text", dict(query_pre_attn_scalar=0), "query_pre_attn_scalar = 0"),
        ("qwen3_moe", dict(num_experts=0), "num_experts = 0"),
        ("qwen3_moe", dict(num_experts=4), "num_experts_per_tok = 8 num_experts = 4"),
        ("qwen3_moe", dict(num_experts_per_tok=0), "num_experts_per_tok = 0"),
        ("qwen3_moe", dict(moe_intermediate_size="768"), "moe_intermediate_size = '768'"),
        ("qwen3_moe", dict(decoder_sparse_step=0), "decoder_sparse_step = 0"),
        ("qwen3_moe", dict(mlp_only_layers=[0.5]), "mlp_only_layers.0 = 0.5"),
        ("qwen3_moe", dict(use_sliding_window=True, sliding_window=1), "sliding_window = 1"),
        ("qwen3_moe", dict(quantization_config={"quant_method": "fp8"}), "quantization_config"),
        ("qwen3_5_moe", dict(text_config=5), "text_config = 5"),
        ("qwen3_5_moe_text", dict(num_experts_per_tok=300, **ATTENDS), "num_experts_per_tok = 300 num_experts = 256"),
        ("qwen3_5_moe_text", dict(shared_expert_intermediate_size=0), "shared_expert_intermediate_size = 0"),
        ("gemma3", {}, "text_config"),
        ("gemma3", dict(text_config=5), "text_config = 5"),
        ("gemma3", dict(text_config=SHAPE, quantization_config={"quant_method": "gptq"}), "quantization_config"),
        ("gemma3", dict(text_config=SHAPE | dict(num_hidden_layers=0)), "num_hidden_layers = 0"),
        ("youtu", {}, "num_key_value_heads = 2 4"),
        ("youtu", MLA | dict(kv_lora_rank=0), "kv_lora_rank = 0"),
        ("youtu_llm", MLA | dict(rope_scaling=dict(type="linear", factor=2.0, mscale_all_dim=1.0)), "'linear' 'yarn'"),
        ("deepseek_v2", MLA | dict(mlp_bias=True), "mlp_bias"),
        ("deepseek_v2", MOE | dict(num_experts_per_tok="gone"), "num_experts_per_tok"),
        ("deepseek_v2", MOE | dict(topk_method="noaux_tc"), "'noaux_tc' 'group_limited_greedy'"),
        ("deepseek_v2", MOE | dict(norm_topk_prob=True), "norm_topk_prob"),
        ("deepseek_v2", MOE | dict(scoring_func="sigmoid"), "'sigmoid' 'softmax'"),
        ("deepseek_v2", MOE | dict(moe_layer_freq=2), "moe_layer_freq = 2"),
        ("deepseek_v2", MOE | dict(num_experts_per_tok=9), "num_experts_per_tok = 9"),
        ("deepseek_v3", MOE | dict(topk_method="greedy"), "'greedy' 'noaux_tc'"),
        ("deepseek_v3", MOE | dict(n_group=3), "n_routed_experts = 8 n_group = 3"),
        ("deepseek_v3", MOE | dict(n_group=2), "topk_group = 4 n_group = 2"),
        ("deepseek_v3", MOE | dict(n_group=4, topk_group=1, num_experts_per_tok=3), "num_experts_per_tok = 3"),
        ("deepseek_v3", MOE | dict(n_group=8, num_experts_per_tok=1), "n_group = 8"),
        ("deepseek_v3", MOE | dict(n_shared_experts=0), "n_shared_experts = 0"),
        ("deepseek_v3", MLA | dict(first_k_dense_replace=-1), "first_k_dense_replace -1"),
        ("deepseek_v3", MLA | dict(num_key_value_heads=2), "num_key_value_heads 2 4"),
        ("deepseek_v3", MLA | dict(quantization_config={"quant_method": "fp8"}), "quantiz"),
        ("deepseek_v32", MLA, "'deepseek_v32' 'deepseek_v3'"),
        ("minicpm3", MLA | dict(kv_lora_rank=256), "'minicpm3' 'deepseek_v3'"),
        ("deepseek_v3", MLA | dict(q_lora_rank=0), "q_lora_rank 0"),
        ("deepseek_v3", MLA | dict(qk_nope_head_dim="12"), "qk_nope_head_dim '12'"),
        ("deepseek_v3", MLA | dict(qk_rope_head_dim=7), "qk_rope_head_dim 7 2"),
        ("deepseek_v3", MLA | dict(hidden_act="gelu"), "hidden_act 'gelu'"),
        ("deepseek_v3", MLA | dict(hidden_size="gone"), "hidden_size"),
        ("qwen3", SLIDES | dict(sliding_window=1), "sliding_window 1 2"),
        ("qwen3", SLIDES | dict(sliding_window=-3), "sliding_window -3 2"),
        ("qwen3", SLIDES | dict(sliding_window="7"), "sliding_window '7'"),
        ("qwen3", SLIDES | dict(sliding_window=None), "use_sliding_window sliding_window"),
        ("qwen3", SLIDES | dict(use_sliding_window=False), "use_sliding_window sliding_window"),
        ("qwen3", SLIDES | dict(layer_types=[SLIDING, FULL]), "2 layer_types 3"),
        ("qwen3", SLIDES | dict(layer_types=[SLIDING, FULL, "chunked_attention"]), "'chunked_attention'"),
        ("lfm3", LFM3 | dict(layer_types=["conv"] * 4), "4 layer_types 5"),
        ("lfm3", LFM3 | dict(layer_types=["conv"] * 5), "attention"),
        ("lfm3", LFM3 | dict(layer_types=["conv", FULL, "linear_attention", "conv", "conv"]), "layer_types.2"),
        ("lfm3", LFM3 | dict(num_attention_heads=3), "3 2"),
        ("lfm3", LFM3 | dict(sliding_window=1), "sliding_window 1 2"),
        ("lfm3", LFM3 | dict(sliding_window=None), "sliding_window"),
        ("lfm3", LFM3 | dict(conv_L_cache=1), "conv_L_cache 1 2"),
        ("lfm3", LFM3 | dict(hidden_size="gone"), "hidden_size"),
        ("lfm3", LFM3 | dict(quantization_config={"bits": 4}), "quantiz"),
        ("lfm3", LFM3 | dict(rope_parameters={"rope_type": "default"}), f"rope_parameters.{FULL}"),
        ("lfm3", LFM3 | dict(rope_parameters={FULL: {"rope_type": "yarn"}}), f"rope_parameters.{FULL}.rope_type"),
        ("lfm3_moe", LFM3, "'lfm3_moe' 'lfm3'"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, model_type, changes, words):
    with refused(UserError, words):
        config_of(tmp_path, model_type, **changes)


@pytest.mark.parametrize("name", ["pocket-windows", "pocket-latent"])
def test_what_would_ignore_windows_or_latents_names_what_does_not(name):
    with refused(UserError, "LLM mini-engine"):
        load_model(name)
    with refused(UserError, "LLM build_engine"):
        Engine.for_model(load(name, "float32", "cpu"), num_blocks=8)


@pytest.mark.parametrize("model", ["pocket", "pocket-hybrid", "pocket-windows", "pocket-latent"])
def test_every_family_reads_what_its_authors_would_sample_with(tmp_path, model):
    raw = json.loads((shipped_checkpoint(model) / "config.json").read_text(encoding="utf-8"))
    authors = dict(temperature=0.6, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.1)
    written = json.dumps(authors | dict(max_new_tokens=5))
    (tmp_path / "generation_config.json").write_text(written, encoding="utf-8")
    assert config_of(tmp_path, **raw).sampling == authors | dict(max_tokens=5)
