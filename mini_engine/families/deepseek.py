"""Lesson 16. DeepSeek-V2, DeepSeek-V3 and Youtu whose layers are all dense: models that keep latents."""

from mini_engine.families.deepseek_config import DeepseekConfig
from mini_engine.families.family import Family
from mini_engine.latents.fast import latent_decoder
from mini_engine.latents.model import latent_model

HEADS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")  # as many key heads as query heads
FAMILY = Family(DeepseekConfig.from_dir, latent_model, latent_decoder, shared=HEADS)
