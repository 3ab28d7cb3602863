"""Course machinery. The hybrid pocket model's shape, and the initialization that makes a delta net remember.

transformers starts every `dt_bias` at one, and such a layer forgets within a few tokens: zeroing its state changes
almost no output, so a test on a random model could not see a lost state. Mamba's initialization (Gu and Dao, 2023)
spreads the time steps over 0.001 to 0.1 instead.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from scripts.pocket.chats import END_OF_TEXT, TURN_END
from scripts.pocket.plan import MAX_POSITIONS, Plan

import torch
from tokenizers import Tokenizer
from torch import nn

if TYPE_CHECKING:
    from transformers import Qwen3_5TextConfig

SHORTEST_STEP, LONGEST_STEP = 0.001, 0.1


def hybrid_config(plan: Plan, tokenizer: Tokenizer) -> "Qwen3_5TextConfig":
    """Return the config: every fourth layer is full attention, the others are gated delta nets."""
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=plan.hidden_size,
        intermediate_size=plan.hidden_size * 8 // 3,
        num_hidden_layers=plan.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        layer_types=["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(plan.layers)],
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(END_OF_TEXT),
        eos_token_id=tokenizer.token_to_id(TURN_END),
    )


@torch.no_grad()
def start_time_steps(model: nn.Module) -> None:
    """Set every `dt_bias` so that softplus(dt_bias) is log-uniform between SHORTEST_STEP and LONGEST_STEP."""
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            low, high = math.log(SHORTEST_STEP), math.log(LONGEST_STEP)
            steps = torch.empty_like(parameter).uniform_(low, high).exp()
            parameter.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus


@contextmanager
def denormals_are_zero(on: bool) -> Iterator[None]:
    """Treat denormal numbers as zero inside the block: decayed states contain many, and each costs a CPU dearly."""
    torch.set_flush_denormal(on)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
