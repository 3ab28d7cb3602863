"""Lesson 0. The dense Qwen3 model, written once for all lessons and independent of the storage.

Tokens are packed, `[T]`, and `meta.positions` has each token's position. The store decides where K and V are kept and
how they are read back; attention makes two calls:

    kv.set_kv(layer, meta.slot_mapping, k, v)      # k, v [T, H_kv, D]
    kv.attend(layer, q, meta) -> out               # q, out [T, H_q, D]

Module names are the checkpoint's, so the name of a tensor says where it belongs.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.model.causal_lm import CausalLM
from mini_engine.model.layers import Embedding, Linear, RMSNorm, SwiGLU
from mini_engine.model.rope import RotaryEmbedding, apply_rope


class KvStore(Protocol):
    """The two calls that attention makes to the store of K and V."""

    def set_kv(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None: ...

    def attend(self, layer: int, q: Tensor, meta: Any) -> Tensor: ...


class Qwen3Attention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245); every query and key head is normalized before RoPE."""

    def __init__(self, config: Qwen3Config, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(hidden, q_size, bias=bias)
        self.k_proj = Linear(hidden, kv_size, bias=bias)
        self.v_proj = Linear(hidden, kv_size, bias=bias)
        self.o_proj = Linear(q_size, hidden, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: KvStore, meta: Any) -> Tensor:
        heads = (len(x), -1, self.head_dim)
        q = apply_rope(self.q_norm(self.q_proj(x).view(heads)), cos, sin)
        k = apply_rope(self.k_norm(self.k_proj(x).view(heads)), cos, sin)
        v = self.v_proj(x).view(heads)
        kv.set_kv(self.layer_idx, meta.slot_mapping, k, v)
        out = kv.attend(self.layer_idx, q, meta)
        return self.o_proj(out.reshape(len(x), -1))


class Qwen3DecoderLayer(nn.Module):
    """Attention, then feed-forward; each reads a normalized copy of x, and its result is added to x."""

    def __init__(self, config: Qwen3Config, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = Qwen3Attention(config, layer_idx)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: KvStore, meta: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, kv, meta)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3Model(nn.Module):
    """Embedding, decoder layers and the final norm."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.rope = RotaryEmbedding(config)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, token_ids: Tensor, kv: KvStore, meta: Any) -> Tensor:
        x = self.embed_tokens(token_ids)
        cos, sin = self.rope(meta.positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, kv, meta)
        return self.norm(x)


class Qwen3ForCausalLM(CausalLM):
    """The model with its vocabulary head; a tied checkpoint uses the embedding matrix as its head.

    Args:
        layers: creates everything below the head.
    """

    def __init__(self, config: Qwen3Config, layers: Callable[[Any], nn.Module] = Qwen3Model) -> None:
        super().__init__(config, layers(config))
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def head_weight(self) -> Tensor:
        """The matrix `[vocab_size, hidden_size]` that turns hidden states into logits."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def forward(self, token_ids: Tensor, kv: KvStore, meta: Any, rows: Tensor | None = None) -> Tensor:
        """Run one packed step.

        Args:
            token_ids: `[T]` int64.
            kv: the store that takes this step's K and V and computes attention.
            meta: the stage's ForwardMeta; the model reads `positions` `[T]` and `slot_mapping`, the store the rest.
            rows: `[R]` int64, indices of the fed tokens whose logits are needed; None means all.

        Returns:
            logits `[R, vocab_size]` in the model's dtype.
        """
        hidden = self.model(token_ids, kv, meta)
        return F.linear(hidden if rows is None else hidden[rows], self.head_weight)
