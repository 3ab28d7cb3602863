"""Lesson 10. Decoder layers with few launches: four joined matrices, attention, and three kernels between them.

Lesson 0's layer is some fifty operations, most of which only pass numbers on to the next one. Here q, k and v are one
matrix, gate and up another, and everything between two matrices is one kernel. The next norm, which reads x anyway,
adds a layer's result to it; the kernel that rotates k also writes k and v into the pool's slots.
"""

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.base.errors import UserError
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.kv.direct import LayerCache
from mini_engine.layers.packed_layers import joined
from mini_engine.model.causal_lm import CausalLM
from mini_engine.model.decoder import Decoder, DecoderLayer
from mini_engine.model.qwen3 import KvStore


class FusedNorm(nn.Module):
    """RMSNorm of x + delta, `[T, hidden_size]`; the sum replaces x."""

    def __init__(self, weight: Tensor, eps: float, kernels: Any) -> None:
        super().__init__()
        self.weight, self.eps, self.kernels = weight.data, eps, kernels

    def forward(self, x: Tensor, delta: Tensor | None) -> Tensor:
        return self.kernels.add_norm(x, delta, self.weight, self.eps)


class FusedDecoderLayer(nn.Module):
    """Lesson 0's decoder layer. Takes x and the pending delta; returns the delta that the next layer has to add."""

    def __init__(self, layer: DecoderLayer, config: Qwen3Config, kernels: Any) -> None:
        super().__init__()
        attention, mlp = layer.mixer, layer.mlp
        self.layer_idx, self.eps, self.kernels = attention.layer_idx, config.rms_norm_eps, kernels
        self.kv_shape = (config.num_key_value_heads, config.head_dim)
        self.qkv, self.o = joined(attention.q_proj, attention.k_proj, attention.v_proj), joined(attention.o_proj)
        self.gate_up, self.down = joined(mlp.gate_proj, mlp.up_proj), joined(mlp.down_proj)
        self.head_norms = torch.stack([attention.q_norm.weight.data, attention.k_norm.weight.data])
        self.input_norm = FusedNorm(layer.input_layernorm.weight, self.eps, kernels)
        self.post_norm = FusedNorm(layer.post_attention_layernorm.weight, self.eps, kernels)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        kv: KvStore,
        meta: Any,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Run the layer. cache: the tensors to write K and V to; None for a store that writes them itself."""
        qkv = F.linear(self.input_norm(x, delta), *self.qkv)
        if cache is None or cache.k.dtype != qkv.dtype:
            q = self.hand_over(qkv, cos, sin, kv, meta)
        else:
            q = self.norm_rope(qkv, cos, sin, cache.slots.contiguous(), cache.k, cache.v)
        out = kv.attend(self.layer_idx, q, meta).reshape(len(x), -1)
        normed = self.post_norm(x, F.linear(out, *self.o))
        return F.linear(self.kernels.silu_mul(F.linear(normed, *self.gate_up)), *self.down)

    def norm_rope(self, qkv: Tensor, cos: Tensor, sin: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return q; write this step's keys and values into `rows` of k and v."""
        return self.kernels.norm_rope(qkv, self.head_norms, cos, sin, self.eps, rows, k, v)

    def hand_over(self, qkv: Tensor, cos: Tensor, sin: Tensor, kv: KvStore, meta: Any) -> Tensor:
        """Return q; pass keys and values to the store."""
        k, v = (qkv.new_empty(len(qkv), *self.kv_shape) for _ in range(2))
        q = self.norm_rope(qkv, cos, sin, torch.arange(len(qkv), device=qkv.device), k, v)
        kv.set_kv(self.layer_idx, meta.slot_mapping, k, v)
        return q


class FusedModel(nn.Module):
    """Decoder layers and the last norm of a loaded model, whose weights it takes over."""

    def __init__(self, model: CausalLM, kernels: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FusedDecoderLayer(layer, model.config, kernels) for layer in model.model.layers)
        self.embed_tokens, self.rope = model.model.embed_tokens, model.model.rope
        self.norm = FusedNorm(model.model.norm.weight, model.config.rms_norm_eps, kernels)

    def forward(self, token_ids: Tensor, kv: KvStore, meta: Any, rows: Tensor | None = None) -> Tensor:
        """Return the normed hidden states `[R, hidden_size]` of `rows`, or of all tokens."""
        x = self.embed_tokens(token_ids)
        cos, sin = self.rope(meta.positions, x.dtype)
        store: Any = kv
        caches = store.layer_caches(meta) if store.direct else [None] * len(self.layers)
        delta = None
        for layer, cache in zip(self.layers, caches, strict=True):
            delta = layer(x, delta, cos, sin, kv, meta, cache)
        if rows is not None and delta is not None:
            x, delta = x[rows], delta[rows]
        return self.norm(x, delta)


def fuse(model: CausalLM, kernels: Any = None) -> CausalLM:
    """Return a model with fused layers that takes over the weights of `model`; `model` cannot run afterwards.

    Args:
        kernels: a module like `layer_kernels`; None for the Triton kernels, after a trial run with the model's shapes.

    Raises:
        UserError: the kernels cannot run here; `model` is unchanged.
    """
    if not isinstance(model.model, Decoder):
        return model
    kernels = kernels or triton_kernels(model)
    return CausalLM(model.config, FusedModel(model, kernels), model.lm_head)


def triton_kernels(model: CausalLM) -> ModuleType:
    """Return the Triton kernels, once each has run on a row of zeros in this model's shapes."""
    try:
        from triton import knobs

        from mini_engine.layers import layer_kernels
    except ImportError as error:
        raise UserError(f"fused layers need Triton, which cannot be imported ({error})", param="backend") from error
    if model.device.type != "cuda" and not knobs.runtime.interpret:
        raise UserError(
            f"fused layers need a GPU, and this model is on {model.device}; choose another backend", param="backend"
        )
    try:
        try_out(layer_kernels, model)
    except Exception as error:  # Triton's compiler raises many types
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"fused layers do not run here ({why}); choose another backend", param="backend") from error
    return layer_kernels


@torch.inference_mode()
def try_out(kernels: Any, model: CausalLM) -> None:
    """Run each kernel on one row, as the model will, which compiles it."""
    config = model.config
    heads, dim = config.num_attention_heads + 2 * config.num_key_value_heads, config.head_dim

    def zeros(*shape: int, dtype: torch.dtype = model.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=model.device)

    x, angles, cache = zeros(1, config.hidden_size), zeros(1, dim), zeros(1, config.num_key_value_heads, dim)
    for delta in (None, x):
        kernels.add_norm(x, delta, x[0], config.rms_norm_eps)
    rows = zeros(1, dtype=torch.int64)
    kernels.norm_rope(zeros(1, heads * dim), zeros(2, dim), angles, angles, config.rms_norm_eps, rows, cache, cache)
    kernels.silu_mul(zeros(1, 2 * config.intermediate_size))
    if model.device.type == "cuda":
        torch.cuda.synchronize()
