"""Lesson 11. A hybrid with lesson 9's linear layers: packed matrices, joined where they share an input.

With packed matrices a delta net is one call, but for its last matrix, where the store leaves states to C++.
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.hybrid.model import GatedAttention, GatedDeltaNet, ZeroCentredRMSNorm
from mini_engine.hybrid.native import step_sizes
from mini_engine.hybrid.packed_mixers import FastStateMixer, PackedDeltaNet
from mini_engine.layers import native
from mini_engine.layers.block_layer import dense_finish
from mini_engine.layers.blocks import PackedEntry, normed
from mini_engine.layers.exchange import Exchange
from mini_engine.layers.fast_model import FastMixers, with_torch_layers
from mini_engine.layers.torch_layers import Join, TorchAttention, TorchDecoderLayer, TorchModel
from mini_engine.model.causal_lm import CausalLM


def one_more(norm: ZeroCentredRMSNorm) -> Tensor:
    """Return what a zero-centred norm multiplies by, in float32: in bfloat16 it would be rounded."""
    return 1.0 + norm.weight.data.float()


class FastZeroCentredNorm(nn.Module):
    """A zero-centred norm in one operation, in float32; `1 + weight` is computed once."""

    def __init__(self, norm: ZeroCentredRMSNorm) -> None:
        super().__init__()
        self.weight, self.scale, self.eps = norm.weight.data, one_more(norm), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.scale.shape, self.scale, self.eps).to(x.dtype)


class FastGatedAttention(TorchAttention):
    """Gated attention without its last matrix, which is `out`. Arguments as for TorchAttention."""

    def __init__(self, attention: GatedAttention, norm: nn.Module, matrix: Join) -> None:
        attention.q_proj, gate = split_heads(attention.q_proj, attention.head_dim)
        super().__init__(attention, norm, matrix, gate, scale=one_more)


def split_heads(linear: nn.Linear, dim: int) -> tuple[nn.Linear, nn.Linear]:
    """Return two layers: one with the first `dim` outputs of each head, and one with the next `dim`.

    The layer's own weight is released.
    """
    parts = [nn.Linear(linear.in_features, linear.out_features // 2, device="meta") for _ in range(2)]
    for name in ("weight", "bias"):
        stored = getattr(linear, name)
        heads = None if stored is None else stored.data.unflatten(0, (-1, 2, dim))
        for i, part in enumerate(parts):
            setattr(part, name, None if heads is None else nn.Parameter(heads[:, i].flatten(0, 1)))
    del linear.weight
    return parts[0], parts[1]


class FastDeltaNet(FastStateMixer):
    """A delta net with its four projections in one matrix, and without its last one, which is `out`.

    Args:
        norm: of the layer's input. matrix: makes one layer of several that share an input.
    """

    def __init__(self, net: GatedDeltaNet, norm: nn.Module, matrix: Join) -> None:
        super().__init__()
        self.config, self.index, self.gated_norm = net.config, net.index, net.norm
        self.conv_weight = net.conv1d.weight.data[:, 0].contiguous()
        self.rate, self.dt_bias = net.A_log.data.float().exp(), net.dt_bias.data.float()
        four = (net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a)
        self.widths = [linear.out_features for linear in four]
        self.project, self.out = normed(norm, matrix(*four)), matrix(net.out_proj)

    def by_store(self, x: Tensor, kv: Any, meta: Any) -> Tensor:
        """See `FastStateMixer`."""
        qkv, z, b, a = x.split(self.widths, dim=-1)
        g = -self.rate * F.softplus(a.float() + self.dt_bias)
        out = kv.scan(self.index, qkv, g, b.float().sigmoid(), self.conv_weight, meta)
        return self.gated_norm(out, z.reshape(out.shape)).flatten(1)

    def pack(self, project: PackedEntry) -> PackedDeltaNet:
        """See `FastStateMixer`."""
        return PackedDeltaNet(project, self.index, step_sizes(self.config), self)


FAST_MIXERS: FastMixers = {GatedDeltaNet: FastDeltaNet, GatedAttention: FastGatedAttention}


def hybrid_decoder(
    model: CausalLM,
    functions: native.Functions | None,
    exchange: Exchange,
    layer: Callable[..., TorchDecoderLayer] = TorchDecoderLayer,
    finish: Callable[..., nn.Module] = dense_finish,
) -> TorchModel:
    """Return a hybrid's decoder with fast layers. layer, finish: as for `with_torch_layers`."""
    norm = FastZeroCentredNorm
    return with_torch_layers(model, functions, exchange, FAST_MIXERS, norm, layer, finish)
