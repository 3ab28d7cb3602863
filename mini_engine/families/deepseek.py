"""Lesson 16. DeepSeek-V2, DeepSeek-V3 and Youtu: models that keep latents, all layers dense or most with experts."""

from functools import partial

from torch import nn

from mini_engine.experts.experts import Experts
from mini_engine.experts.fast import sparse_layers
from mini_engine.experts.feed_forward import SparseFeedForward
from mini_engine.families.deepseek_config import DeepseekConfig
from mini_engine.families.deepseek_experts import GroupRouter
from mini_engine.families.family import Family
from mini_engine.latents.fast import latent_decoder
from mini_engine.latents.model import latent_model
from mini_engine.layers import native
from mini_engine.layers.exchange import Exchange
from mini_engine.layers.torch_layers import TorchModel
from mini_engine.model.causal_lm import CausalLM
from mini_engine.model.layers import SwiGLU

HEADS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")  # as many key heads as query heads


def deepseek_model(config: DeepseekConfig) -> CausalLM:
    """Return the model of this shape, without weights."""
    return latent_model(config, partial(feed_forward, config))


def feed_forward(config: DeepseekConfig, layer_idx: int) -> nn.Module:
    """Return the feed-forward block of a layer, with experts or without."""
    hidden = config.hidden_size
    if not config.routed_experts or layer_idx < config.first_k_dense_replace:
        return SwiGLU(hidden, config.intermediate_size)
    experts = Experts(config.num_experts, hidden, config.moe_intermediate_size)
    return SparseFeedForward(GroupRouter(config), experts, SwiGLU(hidden, config.shared_size))


def deepseek_decoder(model: CausalLM, functions: native.Functions | None, exchange: Exchange) -> TorchModel:
    """Return the decoder with fast layers."""
    if not model.config.routed_experts:
        return latent_decoder(model, functions, exchange)
    layer, finish = sparse_layers(functions)
    return latent_decoder(model, functions, exchange, layer=layer, finish=finish)


def usual_name(stored: str) -> str:
    """Return a tensor's name in this model for its name in a checkpoint."""
    return stored.replace(".shared_experts.", ".shared_expert.")


FAMILY = Family(
    DeepseekConfig.from_dir,
    deepseek_model,
    deepseek_decoder,
    shared=(*HEADS, "num_experts", "shared_size"),
    renamed=usual_name,
    in_float32=("e_score_correction_bias",),
)
