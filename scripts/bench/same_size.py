"""Course machinery. For suite `families`: random checkpoints of every family, with as many active weights in each.

Layers are as wide as Qwen3-0.6B's. Feed-forward blocks are larger or smaller, so that a token meets 220 million weights
in each of the models: 440 MB in bfloat16, many times a processor's cache.
"""

from pathlib import Path
from typing import Any

WINDOW, LAYERS = 128, 12
BASE: dict[str, Any] = dict(
    vocab_size=32_768,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=LAYERS,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=0,
)
WINDOWS = dict(sliding_window=WINDOW, use_sliding_window=True)
LATENTS = dict(num_key_value_heads=16, q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64)
LATENTS |= dict(v_head_dim=128, head_dim=64)
DELTA = dict(linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128)
EXPERTS = dict(num_experts=32, num_experts_per_tok=8, moe_intermediate_size=384, norm_topk_prob=True)
# transformers' class, and what differs from BASE
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3": ("Qwen3Config", {}),
    "Llama": ("LlamaConfig", {}),
    "Qwen2.5": ("Qwen2Config", {}),
    "Qwen3, windows": ("Qwen3Config", WINDOWS | dict(layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 3)),
    "Mistral": ("MistralConfig", dict(sliding_window=WINDOW)),
    "Gemma 3": ("Gemma3TextConfig", dict(sliding_window=WINDOW, query_pre_attn_scalar=128)),
    "LFM3": ("Lfm3Config", dict(sliding_window=WINDOW, intermediate_size=3456)),
    "Qwen3.5": ("Qwen3_5TextConfig", DELTA | dict(intermediate_size=1856)),
    "Youtu": ("YoutuConfig", LATENTS | dict(intermediate_size=2560)),
    "Qwen3, experts": ("Qwen3MoeConfig", EXPERTS),
    "Qwen3.5, experts": (
        "Qwen3_5MoeTextConfig",
        DELTA | EXPERTS | dict(moe_intermediate_size=192, shared_expert_intermediate_size=320),
    ),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        LATENTS
        | dict(n_routed_experts=32, num_experts_per_tok=8, moe_intermediate_size=288, n_shared_experts=1)
        | dict(n_group=4, topk_group=2, first_k_dense_replace=1, intermediate_size=2592),
    ),
}


def checkpoint(name: str) -> Path:
    """Return the directory of a model's checkpoint in bfloat16; transformers writes it if necessary."""
    out = Path("build") / f"same-size-{name.lower().replace(', ', '-').replace(' ', '-')}"
    if (out / "config.json").is_file():
        return out
    from scripts.pocket.checkpoint import all_or_nothing

    import torch
    import transformers

    torch.manual_seed(0)
    architecture, changes = MODELS[name]
    config = getattr(transformers, architecture)(**BASE | changes)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with all_or_nothing(out) as directory:
        model.save_pretrained(directory)
    return out
