"""Lesson 9. Fast layers without a compiler, from what torch alone offers.

q, k and v are one matrix, gate and up another, so a layer makes four matrix calls instead of seven. In bfloat16 oneDNN
packs the weights. Norm and RoPE treat the heads of q and k as one tensor.
"""

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.model.qwen3 import KvStore, Qwen3DecoderLayer, Qwen3ForCausalLM
from mini_engine.model.rope import apply_rope

FEWEST_ROWS = 4  # with fewer, oneDNN is slower, and a single row has other bits than the same row in a batch


class TorchLinear(nn.Module):
    """`nn.Linear`, with a bfloat16 weight in oneDNN's own layout if oneDNN supports this processor."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        has_onednn = torch.backends.mkldnn.is_available()  # torch for macOS is built without it
        pack = has_onednn and weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1) if pack else weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """x `[T, in_features]` -> `[T, out_features]`."""
        if not self.weight.is_mkldnn:
            return F.linear(x, self.weight, self.bias)
        filled = F.pad(x, (0, 0, 0, max(0, FEWEST_ROWS - len(x))))
        return torch.ops.mkldnn._linear_pointwise(filled, self.weight, self.bias, "none", [], "")[: len(x)]


def join(*linears: nn.Linear) -> TorchLinear:
    """Return one layer whose outputs are those of `linears`, one after the other.

    All take the same input, and either all have a bias or none has. Their own weights are released: afterwards only the
    joined layer holds them, even while the model that they came from is still referenced.
    """
    weight = torch.cat([linear.weight.data for linear in linears])
    bias = None if linears[0].bias is None else torch.cat([linear.bias.data for linear in linears])
    for linear in linears:
        del linear.weight
    return TorchLinear(weight, bias)


class TorchDecoderLayer(nn.Module):
    """Lesson 0's decoder layer in fewer, larger operations."""

    def __init__(self, layer: Qwen3DecoderLayer, heads: tuple[int, int]) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx, self.heads, self.eps = attention.layer_idx, heads, layer.input_layernorm.eps
        self.qkv, self.o = join(attention.q_proj, attention.k_proj, attention.v_proj), join(attention.o_proj)
        self.gate_up, self.down = join(mlp.gate_proj, mlp.up_proj), join(mlp.down_proj)
        norms = (attention.q_norm.weight.data, attention.k_norm.weight.data)
        self.head_norm = torch.cat([w.expand(n, -1) for w, n in zip(norms, heads, strict=True)])  # [H_q + H_kv, D]
        self.input_norm, self.post_norm = layer.input_layernorm.weight, layer.post_attention_layernorm.weight

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: KvStore, meta: Any) -> Tensor:
        heads, kv_heads = self.heads
        normed = F.rms_norm(x, x.shape[1:], self.input_norm, self.eps)
        qkv = self.qkv(normed).view(len(x), heads + 2 * kv_heads, -1)
        qk = qkv[:, : heads + kv_heads]
        qk = apply_rope(F.rms_norm(qk, qk.shape[2:], eps=self.eps) * self.head_norm, cos, sin)
        kv.set_kv(self.layer_idx, meta.slot_mapping, qk[:, heads:], qkv[:, heads + kv_heads :])
        x = x + self.o(kv.attend(self.layer_idx, qk[:, :heads], meta).reshape(len(x), -1))
        gate, up = self.gate_up(F.rms_norm(x, x.shape[1:], self.post_norm, self.eps)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class TorchModel(nn.Module):
    """Decoder layers and the last norm of a loaded model, whose weights it takes over."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        super().__init__()
        self.config = model.config
        heads = (self.config.num_attention_heads, self.config.num_key_value_heads)
        loaded = cast(Iterable[Qwen3DecoderLayer], model.model.layers)  # a ModuleList does not say of what
        self.layers = nn.ModuleList(TorchDecoderLayer(layer, heads) for layer in loaded)
        self.rope, self.norm = model.model.rope, model.model.norm

    def forward(self, x: Tensor, kv: KvStore, meta: Any, rows: Tensor | None = None) -> Tensor:
        """Run embedded tokens x `[T, hidden_size]` through the layers; return the given `rows`, or all."""
        cos, sin = self.rope(meta.positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, kv, meta)
        return x if rows is None else x[rows]
