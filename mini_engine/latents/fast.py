"""Lesson 16. Latents with lesson 9's linear layers: packed matrices, joined where inputs are shared, and fused norms.

Attention remains the store's job, so `kv_b_proj` remains a plain matrix: it is never applied as a layer.
"""

from functools import cached_property, partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.latents.mixer import NativeLayer
from mini_engine.latents.model import LatentAttention, LatentStore, rotate_end
from mini_engine.layers.blocks import PackedEntry, normed
from mini_engine.layers.fast_model import with_torch_layers
from mini_engine.layers.torch_layers import FastNorm, Join


class FastLatentAttention(nn.Module):
    """Attention over latents in fewer, larger operations, without its last matrix, which is `out`.

    Args:
        norm: of the layer's input. matrix: makes one layer of several that share an input.
    """

    def __init__(self, attention: LatentAttention, norm: nn.Module, matrix: Join) -> None:
        super().__init__()
        self.config, self.layer_idx = attention.config, attention.layer_idx
        heads, rank = self.config.num_attention_heads, self.config.kv_lora_rank
        self.kv_b = attention.kv_b_proj.weight.data.view(heads, -1, rank)
        self.through_latent = self.config.q_lora_rank is not None
        if self.through_latent:
            first = attention.q_a_proj
            self.q_b = normed(FastNorm(attention.q_a_layernorm), matrix(attention.q_b_proj))
        else:
            first = attention.q_proj
        self.latent_norm = attention.kv_a_layernorm
        self.sizes = (first.out_features, rank, self.config.qk_rope_head_dim)
        self.project = normed(norm, matrix(first, attention.kv_a_proj_with_mqa))
        self.out = matrix(attention.o_proj)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: LatentStore, meta: Any) -> Tensor:
        """Store latents and rotary keys of x `[T, hidden_size]`; return attention `[T, H * v]`."""
        step = getattr(kv, "absorbed_step", None)
        if step is not None and self.native is not None and self.native.dtype == step.dtype:
            return step.run(self.native, self.layer_idx, x, cos, sin)
        q, c, k_rope = self.project(x).split(self.sizes, dim=-1)
        if self.through_latent:
            q = self.q_b(q)
        q = rotate_end(q.unflatten(1, (-1, self.config.qk_head_dim)), cos, sin, self.config)
        c = F.rms_norm(c, c.shape[1:], self.latent_norm.weight, self.latent_norm.eps)
        kv.set_kv(self.layer_idx, meta.slot_mapping, c[:, None], rotate_end(k_rope[:, None], cos, sin, self.config))
        return kv.attend_latents(self.layer_idx, q, self.kv_b, meta).flatten(1)

    @cached_property
    def native(self) -> NativeLayer | None:
        """The layer for steps that are one call; None: its matrices are not packed."""
        if not isinstance(self.project, PackedEntry):
            return None
        queries: Any = self.q_b if self.through_latent else None
        return NativeLayer(self.project, queries, self.latent_norm, self.kv_b, self.config)


latent_decoder = partial(with_torch_layers, fast_mixers={LatentAttention: FastLatentAttention})
