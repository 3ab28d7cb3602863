"""Lesson 11. The hybrid model (Qwen3.5's text model, dense), independent of the store and of any lesson's classes.

Three of four layers are gated delta nets, the others attention. A delta net needs one call of the store in addition to
lesson 0's two, the same for prefill, chunks and decode:

    kv.scan(layer, qkv, g, beta, conv_weight, meta) -> out      # qkv [T, conv_dim]; g, beta [T, H_v]; out [T, H_v, D_v]

The store convolves each sequence's qkv together with the last inputs it has kept, advances each sequence's state by its
tokens and keeps both. Layers are counted by kind: an attention layer's index is among the attention layers, a delta
net's among the delta nets.

Three things differ from Qwen3's attention: RoPE rotates only the first `rotary_dim` dimensions of a head, q_proj also
yields a gate for every head, and a norm scales by 1 + weight.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.hybrid.hybrid_config import HybridConfig
from mini_engine.model.causal_lm import CausalLM, causal_lm
from mini_engine.model.decoder import Decoder, DecoderLayer
from mini_engine.model.kinds import FULL
from mini_engine.model.layers import Linear, SwiGLU
from mini_engine.model.qwen3 import KvStore
from mini_engine.model.rope import RotaryEmbedding, apply_rope


class HybridStore(KvStore, Protocol):
    """The store that the model needs: lesson 0's two calls for attention, and one for delta nets."""

    def scan(self, layer: int, qkv: Tensor, g: Tensor, beta: Tensor, conv_weight: Tensor, meta: Any) -> Tensor: ...


class ZeroCentredRMSNorm(nn.Module):
    """RMSNorm with weights around 0: x / rms(x) * (1 + weight), in float32 throughout and cast once, at the end."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (x32 * (1.0 + self.weight.float())).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """RMSNorm of a delta net's output heads, times SiLU of the gate, cast once. Its weights are around 1."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * x32 * F.silu(gate.float())).to(x.dtype)


class GatedAttention(nn.Module):
    """Grouped-query attention whose output passes a sigmoid gate (Qiu et al., 2025, arXiv:2505.06708)."""

    def __init__(self, config: HybridConfig, index: int) -> None:
        super().__init__()
        self.layer_idx = index
        self.head_dim = config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj: nn.Linear = Linear(hidden, 2 * q_size, bias=bias)  # each head's query, then its gate
        self.k_proj = Linear(hidden, kv_size, bias=bias)
        self.v_proj = Linear(hidden, kv_size, bias=bias)
        self.o_proj: nn.Module = Linear(q_size, hidden, bias=bias)
        self.q_norm = ZeroCentredRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = ZeroCentredRMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: HybridStore, meta: Any) -> Tensor:
        heads = (len(x), -1, self.head_dim)
        q, gate = self.q_proj(x).view(len(x), -1, 2 * self.head_dim).chunk(2, dim=-1)
        q = partial_rope(self.q_norm(q), cos, sin)
        k = partial_rope(self.k_norm(self.k_proj(x).view(heads)), cos, sin)
        v = self.v_proj(x).view(heads)
        kv.set_kv(self.layer_idx, meta.slot_mapping, k, v)
        out = kv.attend(self.layer_idx, q, meta)
        return self.o_proj((out * gate.sigmoid()).reshape(len(x), -1))


def partial_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dimensions of each head, as many as cos and sin have; the rest pass. x `[T, H, D]`."""
    turned, rest = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), dim=-1)
    return torch.cat((apply_rope(turned, cos, sin), rest), dim=-1)


class GatedDeltaNet(nn.Module):
    """Linear attention with a state per value head (Yang et al., 2024, arXiv:2412.06464).

    A_log, dt_bias: `[H_v]`; how fast each head forgets. g = -exp(A_log) * softplus(a + dt_bias) is the logarithm of
    the share of the state that a token leaves.
    """

    def __init__(self, config: HybridConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        hidden, heads = config.hidden_size, config.linear_num_value_heads
        self.in_proj_qkv = Linear(hidden, config.conv_dim, bias=False)
        self.in_proj_z = Linear(hidden, config.value_dim, bias=False)
        self.in_proj_b = Linear(hidden, heads, bias=False)
        self.in_proj_a = Linear(hidden, heads, bias=False)
        self.conv1d = ConvWeight(config.conv_dim, config.linear_conv_kernel_dim)
        self.dt_bias = nn.Parameter(torch.ones(heads))
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.norm = GatedRMSNorm(config.linear_value_head_dim, config.rms_norm_eps)
        self.out_proj = Linear(config.value_dim, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: HybridStore, meta: Any) -> Tensor:
        """Return the delta net's output `[T, hidden_size]`; positions, and so `cos` and `sin`, play no role in it."""
        qkv, z = self.in_proj_qkv(x), self.in_proj_z(x)
        beta = self.in_proj_b(x).float().sigmoid()
        g = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        out = kv.scan(self.index, qkv, g, beta, self.conv1d.weight[:, 0], meta)
        return self.out_proj(self.norm(out, z.view(out.shape)).reshape(len(x), -1))


class ConvWeight(nn.Module):
    """The weight of a depthwise convolution, `[channels, 1, taps]`; applied by the store, which has the inputs."""

    def __init__(self, channels: int, taps: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, taps))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None


def swiglu(config: HybridConfig) -> nn.Module:
    """Return lesson 0's feed-forward block."""
    return SwiGLU(config.hidden_size, config.intermediate_size)


def hybrid_model(config: Any, mlp: Callable[[Any], nn.Module] = swiglu) -> CausalLM:
    """Return the model of this shape, without weights. RoPE is that of heads with `rotary_dim` dimensions.

    Args:
        mlp: makes the feed-forward block of a layer.
    """
    rope = RotaryEmbedding(replace(config, head_dim=config.rotary_dim))
    layers = (layer_of(config, i, mlp(config)) for i in range(config.num_hidden_layers))
    return causal_lm(config, Decoder(config, rope, layers, ZeroCentredRMSNorm))


def layer_of(config: HybridConfig, layer_idx: int, mlp: nn.Module) -> DecoderLayer:
    """Return a decoder layer: attention or a delta net, then feed-forward."""
    kind = config.layer_types[layer_idx]
    index = config.layer_types[:layer_idx].count(kind)
    mixer, name = (GatedAttention, "self_attn") if kind == FULL else (GatedDeltaNet, "linear_attn")
    return DecoderLayer(config, mixer(config, index), name, ZeroCentredRMSNorm, mlp)
