"""Lesson 16. DeepSeek-V3 whose layers are all dense: a model that keeps latents."""

from mini_engine.families.family import Family
from mini_engine.latents.fast import latent_decoder
from mini_engine.latents.latent_config import LatentConfig
from mini_engine.latents.model import latent_model

HEADS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")  # as many key heads as query heads
FAMILY = Family(LatentConfig.from_dir, latent_model, latent_decoder, shared=HEADS)
