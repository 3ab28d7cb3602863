"""Lesson 16. DeepSeek-V3, independent of the store and of how it reads latents.

Only attention differs from lesson 0's model. It stores not K and V, but the latents they are computed from:

    kv.set_kv(layer, meta.slot_mapping, c, k_rope)       # c [T, 1, rank], k_rope [T, 1, rope]
    kv.attend_latents(layer, q, kv_b, meta) -> out       # kv_b [H, nope + v, rank], out [T, H, v]

Module names are the checkpoint's.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mini_engine.latents.latent_config import LatentConfig
from mini_engine.model.causal_lm import CausalLM, causal_lm
from mini_engine.model.decoder import Decoder, DecoderLayer
from mini_engine.model.layers import Linear, RMSNorm
from mini_engine.model.rope import RotaryEmbedding, apply_rope

LATENT_EPS = 1e-6  # of the latents' norms, whatever config.json says about other norms; as in transformers


class LatentStore(Protocol):
    """The two calls that attention makes to the store of latents."""

    def set_kv(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None: ...

    def attend_latents(self, layer: int, q: Tensor, kv_b: Tensor, meta: Any) -> Tensor: ...


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-AI, 2024, arXiv:2405.04434).

    `kv_b_proj` expands a latent to each head's key and value. The store gets it as a matrix and decides whether to
    multiply latents by it, or queries and results.
    """

    def __init__(self, config: LatentConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.config = layer_idx, config
        hidden, heads, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
        if config.q_lora_rank is None:
            self.q_proj = Linear(hidden, heads * config.qk_head_dim, bias=False)
        else:
            self.q_a_proj = Linear(hidden, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_EPS)
            self.q_b_proj = Linear(config.q_lora_rank, heads * config.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = Linear(hidden, config.kv_lora_rank + config.qk_rope_head_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, LATENT_EPS)
        self.kv_b_proj = Linear(config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False)
        self.o_proj = Linear(heads * config.v_head_dim, hidden, bias=bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: LatentStore, meta: Any) -> Tensor:
        """Store each token's latent, normed, and its rotary key; return attention `[T, hidden]` of x `[T, hidden]`.

        Args:
            cos, sin: `[T, rope]`, of the tokens' positions. kv, meta: the store and its plan, as described above.
        """
        config = self.config
        q = self.queries(x).view(len(x), -1, config.qk_head_dim)
        c, k_rope = self.kv_a_proj_with_mqa(x).split((config.kv_lora_rank, config.qk_rope_head_dim), dim=-1)
        q, k_rope = rotate_end(q, cos, sin, config), rotate_end(k_rope[:, None], cos, sin, config)
        kv.set_kv(self.layer_idx, meta.slot_mapping, self.kv_a_layernorm(c)[:, None], k_rope)
        kv_b = self.kv_b_proj.weight.view(config.num_attention_heads, -1, config.kv_lora_rank)
        return self.o_proj(kv.attend_latents(self.layer_idx, q, kv_b, meta).flatten(1))

    def queries(self, x: Tensor) -> Tensor:
        """Return the queries of all heads, `[T, H * (nope + rope)]`. Their own latent, if any, is not kept."""
        if self.config.q_lora_rank is None:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))


def rotate_end(x: Tensor, cos: Tensor, sin: Tensor, config: LatentConfig) -> Tensor:
    """Rotate the last `qk_rope_head_dim` elements of each head by the token's angles. x `[T, H, D]`, D at least that.

    With `rope_interleave`, neighbours form a pair: they are first moved apart, in queries and keys alike, so that dot
    products do not change.
    """
    rest, turned = x.split((x.shape[-1] - config.qk_rope_head_dim, config.qk_rope_head_dim), dim=-1)
    if config.rope_interleave:
        turned = turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return torch.cat((rest, apply_rope(turned, cos, sin)), dim=-1)


def dense(layer_idx: int) -> None:
    """Leave the feed-forward block of a layer as it is in lesson 0."""


def latent_model(config: LatentConfig, mlp: Callable[[int], nn.Module | None] = dense) -> CausalLM:
    """Return the model of this shape, without weights.

    Args:
        mlp: makes the feed-forward block of a layer; None: lesson 0's.
    """
    layers = (DecoderLayer(config, LatentAttention(config, i), mlp=mlp(i)) for i in range(config.num_hidden_layers))
    return causal_lm(config, Decoder(config, RotaryEmbedding(config), layers))
