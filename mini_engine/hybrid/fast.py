"""Lesson 11. A hybrid with lesson 9's linear layers: packed matrices, joined where they share an input.

With packed matrices half a layer is one call of `native.py`: a delta net, and feed-forward.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.hybrid.model import GatedAttention, GatedDeltaNet, HybridStore, ZeroCentredRMSNorm
from mini_engine.hybrid.native import Gates, Half, NativeStep, by_tap
from mini_engine.hybrid.store import HybridKv
from mini_engine.layers import native
from mini_engine.layers.exchange import WHOLE, Exchange
from mini_engine.layers.fast_model import join_packed, with_torch_layers
from mini_engine.layers.packed_layers import PackedLinear
from mini_engine.layers.packed_norm import PackedNorm
from mini_engine.layers.torch_layers import Join, TorchAttention, TorchDecoderLayer, TorchModel
from mini_engine.model.causal_lm import CausalLM
from mini_engine.model.decoder import Decoder, DecoderLayer
from mini_engine.model.layers import SwiGLU


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


class FastDeltaNet(nn.Module):
    """A delta net with its four projections in one matrix, and without its last one, which is `out`.

    Args:
        norm: of the layer's input. matrix: makes one layer of several that share an input.
    """

    def __init__(self, net: GatedDeltaNet, norm: nn.Module, matrix: Join) -> None:
        super().__init__()
        self.index, self.norm, self.gated_norm = net.index, norm, net.norm
        self.conv_weight = net.conv1d.weight.data[:, 0].contiguous()
        self.rate, self.dt_bias = net.A_log.data.float().exp(), net.dt_bias.data.float()
        four = (net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a)
        self.sizes = [linear.out_features for linear in four]
        self.project, self.out = matrix(*four), matrix(net.out_proj)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: HybridStore, meta: Any) -> Tensor:
        """Advance the states by x `[T, hidden_size]`; return the gated outputs `[T, value_dim]`."""
        qkv, z, b, a = self.project(self.norm(x)).split(self.sizes, dim=-1)
        g = -self.rate * F.softplus(a.float() + self.dt_bias)
        out = kv.scan(self.index, qkv, g, b.float().sigmoid(), self.conv_weight, meta)
        return self.gated_norm(out, z.reshape(out.shape)).flatten(1)


FAST_MIXERS = {GatedDeltaNet: FastDeltaNet, GatedAttention: FastGatedAttention}


class PackedDeltaNet(FastDeltaNet):
    """A delta net that is a single call, where the store leaves states to C++."""

    def __init__(self, net: GatedDeltaNet, norm: FastZeroCentredNorm, matrix: Join) -> None:
        super().__init__(net, norm, matrix)
        self.norm_weight, self.taps = net.norm.weight.data.float(), by_tap(self.conv_weight)
        pointers = dict(rate=self.rate, dt_bias=self.dt_bias, norm=self.norm_weight)
        self.gates = Gates(eps=net.norm.eps, **{name: tensor.data_ptr() for name, tensor in pointers.items()})
        self.struct = half_of(norm, first=self.project, last=self.out)

    def add_to(self, x: Tensor, kv: HybridKv) -> Tensor:
        """Add the output for a step's tokens to x `[T, hidden_size]`, in place."""
        assert kv.native_step is not None and kv.feeds is not None
        states = kv.states.get_layer_state(self.index)
        return kv.native_step.delta_net(x, self.struct, self.gates, states, self.taps, kv.feeds)


class PackedFeedForward(nn.Module):
    """Half a layer in one call: norm, feed-forward block and residual."""

    def __init__(self, mlp: SwiGLU, norm: FastZeroCentredNorm, matrix: Join, step: NativeStep) -> None:
        super().__init__()
        self.norm, self.step = norm, step
        self.gate, self.up, self.down = matrix(mlp.gate_proj), matrix(mlp.up_proj), matrix(mlp.down_proj)
        self.struct = half_of(norm, first=self.gate, second=self.up, last=self.down)

    def forward(self, x: Tensor) -> Tensor:
        """Add the output of the feed-forward block to x `[T, hidden_size]`, in place."""
        return self.step.feed_forward(x, self.struct)


class PackedHybridLayer(nn.Module):
    """A decoder layer in two halves: mixer, and feed-forward.

    Args:
        feed_forward: makes the second half of the feed-forward block, its norm, `matrix` and `step`.
    """

    def __init__(
        self,
        layer: DecoderLayer,
        matrix: Join,
        step: NativeStep,
        feed_forward: Callable[..., nn.Module] = PackedFeedForward,
    ) -> None:
        super().__init__()
        fast: Any = PackedDeltaNet if isinstance(layer.mixer, GatedDeltaNet) else FastGatedAttention
        self.mixer = fast(layer.mixer, FastZeroCentredNorm(layer.input_layernorm), matrix)
        self.feed_forward = feed_forward(layer.mlp, FastZeroCentredNorm(layer.post_attention_layernorm), matrix, step)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv: HybridKv, meta: Any, rows: Tensor | None = None
    ) -> Tensor:
        if isinstance(self.mixer, PackedDeltaNet) and kv.native_step:
            x = self.mixer.add_to(x, kv)
        else:
            x = x + self.mixer.out(self.mixer(x, cos, sin, kv, meta))
        return self.feed_forward(x if rows is None else x[rows])


def half_of(norm: FastZeroCentredNorm, **linears: nn.Module) -> Half:
    """Return the struct of half a layer; the modules must outlive it."""
    packed = {name: cast(PackedLinear, linear) for name, linear in linears.items()}
    matrices = {name: linear.matrix for name, linear in packed.items()}
    hidden, width = packed["first"].packed.in_features, packed["last"].packed.in_features
    return Half(hidden=hidden, width=width, norm=norm.scale.data_ptr(), eps=norm.eps, **matrices)


class PackedHybrid(TorchModel):
    """A decoder over packed matrices. native_step: the C++ step that its store can use, too."""

    def __init__(self, decoder: Decoder, layers: Iterable[nn.Module], norm: nn.Module, native_step: NativeStep) -> None:
        super().__init__(decoder, layers, norm)
        self.native_step = native_step


def hybrid_decoder(
    model: CausalLM,
    functions: native.Functions | None,
    exchange: Exchange,
    layer: Callable[..., TorchDecoderLayer] = TorchDecoderLayer,
    feed_forward: Callable[..., nn.Module] = PackedFeedForward,
) -> TorchModel:
    """Return a hybrid's decoder with fast layers.

    Args:
        layer: makes torch's layers. feed_forward: as for `PackedHybridLayer`.
    """
    fast = partial(with_torch_layers, model, functions, exchange, FAST_MIXERS, FastZeroCentredNorm, layer)
    if functions is None:
        return fast()
    step, matrix = NativeStep(model.config, model.dtype), partial(join_packed, functions)
    if exchange is WHOLE:
        layers = (PackedHybridLayer(loaded, matrix, step, feed_forward) for loaded in model.model.layers)
    else:  # the exchange comes in the middle of such a layer's calls
        layers = fast().layers
    norm = PackedNorm(functions, FastZeroCentredNorm(model.model.norm))
    return PackedHybrid(model.model, layers, norm, step)


def native_step_for(model: CausalLM) -> NativeStep | None:
    """Return the C++ step of delta nets if the model's layers are packed; None: the store uses its own."""
    return model.model.native_step if isinstance(model.model, PackedHybrid) else None
