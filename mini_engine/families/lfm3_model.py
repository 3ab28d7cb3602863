"""Lesson 15. The layers of LFM3: short convolutions, windows and full attention in one model.

Attention is lesson 0's with a gate for each head. Full layers and those with windows rotate by other angles, so `cos`
and `sin` are two `[T, D]` each here. Layers are counted by what they keep: those with K and V, and those with a state.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mini_engine.families.lfm3_config import ATTENTION, CONV, Lfm3Config, Rope
from mini_engine.hybrid.short_conv import ShortConv
from mini_engine.model.causal_lm import CausalLM, causal_lm
from mini_engine.model.decoder import Decoder, DecoderLayer, Norm, scaled
from mini_engine.model.layers import Linear, RMSNorm
from mini_engine.model.qwen3 import KvStore, Qwen3Attention
from mini_engine.model.rope import apply_rope


class TwoRotations(nn.Module):
    """The angles of full and of sliding layers. inv_freq: `[2, D/2]` float32, radians per position."""

    inv_freq: Tensor

    def __init__(self, ropes: Sequence[Rope], head_dim: int) -> None:
        super().__init__()
        frequencies = torch.stack([inverse_frequencies(rope, head_dim) for rope in ropes])
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return cosines and sines of the angles at `positions` `[T]`: two `[T, D]` each, float32 for any dtype."""
        angles = positions[None, :, None].float() * self.inv_freq[:, None]
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().unbind(), angles.sin().unbind()


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return `[D/2]` float32 on the CPU: the radians that each pair turns per position; some pairs may not turn."""
    turning = head_dim // 2
    if rope.rope_type == "proportional":
        turning = int(rope.partial_rotary_factor * head_dim // 2)
    exponents = torch.arange(0, 2 * turning, 2, dtype=torch.float32, device="cpu") / head_dim
    found = torch.zeros(head_dim // 2, device="cpu")
    found[:turning] = 1.0 / rope.rope_theta**exponents
    return found / rope.factor if rope.rope_type == "proportional" else found


class HeadGatedAttention(Qwen3Attention):
    """Lesson 0's attention, with float32 angles of the layer's type, and a gate from 0 to 1 for each head.

    Args:
        index: among the layers with K and V. rotation: the layer's index in `cos` and `sin`. has_gate: False leaves
            the gates out. norm: of the heads. scale: multiplies the queries.
    """

    def __init__(
        self,
        config: Any,
        index: int,
        rotation: int,
        has_gate: bool = True,
        norm: Norm = RMSNorm,
        scale: float = 1.0,
    ) -> None:
        super().__init__(config, index, norm)
        self.rotation, self.scale = rotation, scale
        self.gate_proj = Linear(config.hidden_size, config.num_attention_heads, bias=False) if has_gate else None

    def forward(self, x: Tensor, cos: Any, sin: Any, kv: KvStore, meta: Any) -> Tensor:
        heads, angles = (len(x), -1, self.head_dim), (cos[self.rotation], sin[self.rotation])
        q = scaled(apply_rope(self.q_norm(self.q_proj(x).view(heads)), *angles).to(x.dtype), self.scale)
        k = apply_rope(self.k_norm(self.k_proj(x).view(heads)), *angles).to(x.dtype)
        kv.set_kv(self.layer_idx, meta.slot_mapping, k, self.v_proj(x).view(heads))
        out = kv.attend(self.layer_idx, q, meta)
        if self.gate_proj is not None:
            out = out * self.gate_proj(x).sigmoid()[:, :, None]
        return self.o_proj(out.reshape(len(x), -1))


class SandwichLayer(DecoderLayer):
    """A decoder layer that also norms what is added to x. Arguments as for lesson 0's."""

    def __init__(
        self, config: Any, mixer: nn.Module, name: str, norm: Norm = RMSNorm, mlp: nn.Module | None = None
    ) -> None:
        super().__init__(config, mixer, name, norm, mlp)
        self.post_operator_norm: Any = norm(config.hidden_size, config.rms_norm_eps)
        self.post_ffn_norm: Any = norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: Any, meta: Any) -> Tensor:
        x = x + self.post_operator_norm(self.mixer(self.input_layernorm(x), cos, sin, kv, meta))
        return x + self.post_ffn_norm(self.mlp(self.post_attention_layernorm(x)))


def lfm3_model(config: Lfm3Config) -> CausalLM:
    """Return the model of this shape, without weights."""
    layers = (layer_of(config, i) for i in range(config.num_hidden_layers))
    return causal_lm(config, Decoder(config, TwoRotations(config.ropes, config.head_dim), layers))


def layer_of(config: Lfm3Config, layer_idx: int) -> DecoderLayer:
    """Return a decoder layer with the mixer of its type."""
    kind, before = config.layer_types[layer_idx], config.layer_types[:layer_idx]
    if kind == CONV:
        sizes = (config.hidden_size, config.conv_channels, config.conv_L_cache, config.conv_bias)
        mixer, name = ShortConv(*sizes, before.count(CONV)), "conv"
    else:
        index = len(before) - before.count(CONV)
        mixer = HeadGatedAttention(config, index, ATTENTION.index(kind), config.use_attention_gate)
        name = "self_attn"
    return (SandwichLayer if config.use_sandwich_norm else DecoderLayer)(config, mixer, name)
