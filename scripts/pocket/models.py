"""Course machinery. The pocket models' shapes, and the initialization that makes a delta net remember.

transformers starts every `dt_bias` at one, and such a layer forgets within a few tokens: zeroing its state changes
almost no output, so a test on a random model could not see a lost state. Mamba's initialization (Gu and Dao, 2023)
spreads the time steps over 0.001 to 0.1 instead.
"""

import math
from typing import Any

from scripts.pocket.chats import END_OF_TEXT, TURN_END

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

MAX_POSITIONS, HIDDEN = 8192, 192
SHORTEST_STEP, LONGEST_STEP = 0.001, 0.1
ROPE = {"rope_type": "default", "rope_theta": 1_000_000.0}
SHAPES: dict[str, dict[str, Any]] = {  # what a kind has besides what all have in common
    "qwen3": dict(model_type="qwen3", num_hidden_layers=6, num_key_value_heads=2, head_dim=64, rope_parameters=ROPE),
    "hybrid": dict(  # three delta nets, then attention, twice
        model_type="qwen3_5_text", num_hidden_layers=8, num_key_value_heads=2, head_dim=64,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2, linear_num_key_heads=4,
        linear_num_value_heads=8, linear_key_head_dim=32, linear_value_head_dim=32,
        rope_parameters=ROPE | {"partial_rotary_factor": 0.25},
    ),
    "latent": dict(  # a DeepSeek-V3 whose layers are all dense: a latent and a rotary key for each token
        model_type="deepseek_v3", num_hidden_layers=6, first_k_dense_replace=6, num_key_value_heads=4, q_lora_rank=96,
        kv_lora_rank=64, qk_nope_head_dim=48, qk_rope_head_dim=32, v_head_dim=48, num_mtp_layers=0,
        rope_parameters=ROPE,
    ),
}  # fmt: skip


def new_model(kind: str, tokenizer: Tokenizer) -> PreTrainedModel:
    """Return a model of that kind with random weights."""
    config = AutoConfig.for_model(
        **SHAPES[kind],
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN * 8 // 3,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(END_OF_TEXT),
        eos_token_id=tokenizer.token_to_id(TURN_END),
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    start_time_steps(model)
    return model


@torch.no_grad()
def start_time_steps(model: nn.Module) -> None:
    """Set every `dt_bias` so that softplus(dt_bias) is log-uniform between SHORTEST_STEP and LONGEST_STEP."""
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            low, high = math.log(SHORTEST_STEP), math.log(LONGEST_STEP)
            steps = torch.empty_like(parameter).uniform_(low, high).exp()
            parameter.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus
