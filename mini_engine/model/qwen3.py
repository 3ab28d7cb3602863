"""Lesson 0. The dense Qwen3 model, written once for all lessons and independent of the storage.

Its mixer is grouped-query attention. The store decides where K and V are kept and how they are read back; attention
makes two calls:

    kv.set_kv(layer, meta.slot_mapping, k, v)      # k, v [T, H_kv, D]
    kv.attend(layer, q, meta) -> out               # q, out [T, H_q, D]
"""

from typing import Any, Protocol

from torch import Tensor, nn

from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.model.causal_lm import CausalLM, causal_lm
from mini_engine.model.decoder import Decoder, DecoderLayer, Norm
from mini_engine.model.layers import Linear, RMSNorm
from mini_engine.model.rope import RotaryEmbedding, apply_rope


class KvStore(Protocol):
    """The two calls that attention makes to the store of K and V."""

    def set_kv(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None: ...

    def attend(self, layer: int, q: Tensor, meta: Any) -> Tensor: ...


class Qwen3Attention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245); every query and key head is normalized before RoPE.

    Args:
        norm: of the heads. output_bias: the last matrix has a bias; None: if the others have.
    """

    def __init__(
        self, config: Qwen3Config, layer_idx: int, norm: Norm = RMSNorm, output_bias: bool | None = None
    ) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(hidden, q_size, bias=bias)
        self.k_proj = Linear(hidden, kv_size, bias=bias)
        self.v_proj = Linear(hidden, kv_size, bias=bias)
        self.o_proj = Linear(q_size, hidden, bias=bias if output_bias is None else output_bias)
        self.q_norm: Any = norm(config.head_dim, config.rms_norm_eps)
        self.k_norm: Any = norm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: KvStore, meta: Any) -> Tensor:
        heads = (len(x), -1, self.head_dim)
        q = apply_rope(self.q_norm(self.q_proj(x).view(heads)), cos, sin)
        k = apply_rope(self.k_norm(self.k_proj(x).view(heads)), cos, sin)
        v = self.v_proj(x).view(heads)
        kv.set_kv(self.layer_idx, meta.slot_mapping, k, v)
        out = kv.attend(self.layer_idx, q, meta)
        return self.o_proj(out.reshape(len(x), -1))


def qwen3_model(config: Qwen3Config) -> CausalLM:
    """Return the model of this shape, without weights."""
    layers = (DecoderLayer(config, Qwen3Attention(config, i)) for i in range(config.num_hidden_layers))
    return causal_lm(config, Decoder(config, RotaryEmbedding(config), layers))
