"""Course machinery. The shape of the pocket model with latents: a DeepSeek-V3 whose layers are all dense."""

from scripts.pocket.chats import END_OF_TEXT, TURN_END
from scripts.pocket.plan import MAX_POSITIONS, Plan

from tokenizers import Tokenizer
from transformers import DeepseekV3Config


def latent_config(plan: Plan, tokenizer: Tokenizer) -> DeepseekV3Config:
    """Return the config: a latent of 64 numbers and a rotary key of 32 for each token, and no experts."""
    return DeepseekV3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=plan.hidden_size,
        intermediate_size=plan.hidden_size * 8 // 3,
        num_hidden_layers=plan.layers,
        first_k_dense_replace=plan.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=48,
        qk_rope_head_dim=32,
        v_head_dim=48,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        num_mtp_layers=0,
        bos_token_id=tokenizer.token_to_id(END_OF_TEXT),
        eos_token_id=tokenizer.token_to_id(TURN_END),
    )
