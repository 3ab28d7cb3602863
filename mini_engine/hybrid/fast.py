"""Lesson 11. A hybrid with lesson 9's linear layers: packed matrices, joined where they share an input.

With packed matrices half a layer is one call of `native.py`: feed-forward always, a delta net in decode steps. Prompts
use the store's own scan. Attention is unchanged.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.hybrid.model import (
    GatedDeltaNet,
    HybridDecoderLayer,
    HybridForCausalLM,
    HybridStore,
    ZeroCentredRMSNorm,
)
from mini_engine.hybrid.native import Gates, Half, NativeStep
from mini_engine.hybrid.store import HybridKv
from mini_engine.layers import native
from mini_engine.layers.exchange import WHOLE, Exchange, Summed
from mini_engine.layers.fast_model import check_backend, functions_for
from mini_engine.layers.packed_layers import PackedLinear
from mini_engine.layers.torch_layers import TorchLinear
from mini_engine.model.causal_lm import CausalLM
from mini_engine.model.layers import SwiGLU

Pack = Callable[[Tensor, Tensor | None], nn.Module]


class FastHybridForCausalLM(CausalLM):
    """The model that `speed_up_hybrid` returns. `head` turns normed rows into logits; torch's has no native step."""

    def __init__(self, model: CausalLM, head: nn.Module, native_step: NativeStep | None) -> None:
        super().__init__(model.config, model.model)
        self.head, self.native_step = head, native_step

    def forward(self, token_ids: Tensor, kv: HybridStore, meta: Any, rows: Tensor | None = None) -> Tensor:
        """Run one packed step; return logits `[R, vocab_size]` of `rows` `[R]`, or of all fed tokens."""
        hidden = self.model(token_ids, kv, meta)
        return self.head(hidden if rows is None else hidden[rows])


class RowsOf(nn.Module):
    """An embedding that looks up its rows in a packed head: tied weights exist once."""

    def __init__(self, head: PackedLinear) -> None:
        super().__init__()
        self.rows = head.packed.rows

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.rows(token_ids)


class FastSwiGLU(nn.Module):
    """The feed-forward block with gate and up in one matrix."""

    def __init__(self, mlp: SwiGLU, pack: Pack, exchange: Exchange = WHOLE) -> None:
        super().__init__()
        self.exchange = exchange
        self.gate_up, self.down = pack(joined(mlp.gate_proj, mlp.up_proj), None), pack(mlp.down_proj.weight.data, None)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.exchange.all_reduce(self.down(F.silu(gate).mul_(up)))


class FastDeltaNet(nn.Module):
    """A delta net with its four projections in one matrix."""

    def __init__(self, layer: GatedDeltaNet, pack: Pack, heads: int, exchange: Exchange = WHOLE) -> None:
        super().__init__()
        self.exchange = exchange
        self.index, self.norm, self.conv_weight = layer.index, layer.norm, layer.conv1d.weight.data[:, 0].contiguous()
        self.rate, self.dt_bias = layer.A_log.data.float().exp(), layer.dt_bias.data.float()
        self.sizes = (len(self.conv_weight), heads * layer.head_dim, heads, heads)
        four = (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a)
        self.project, self.out = pack(joined(*four), None), pack(layer.out_proj.weight.data, None)

    def forward(self, x: Tensor, kv: HybridStore, meta: Any) -> Tensor:
        qkv, z, b, a = self.project(x).split(self.sizes, dim=-1)
        g = -self.rate * F.softplus(a.float() + self.dt_bias)
        out = kv.scan(self.index, qkv, g, b.float().sigmoid(), self.conv_weight, meta)
        return self.exchange.all_reduce(self.out(self.norm(out, z.reshape(out.shape)).reshape(len(x), -1)))


class PackedDeltaNet(nn.Module):
    """The first half of a layer with a delta net. In a decode step it is a single call."""

    def __init__(self, layer: HybridDecoderLayer, pack: Pack, heads: int) -> None:
        super().__init__()
        delta, norm = cast(GatedDeltaNet, layer.linear_attn), layer.input_layernorm
        self.norm, self.net = FastNorm(norm.weight.data, norm.eps), FastDeltaNet(delta, pack, heads)
        self.norm_weight = delta.norm.weight.data.float()
        pointers = dict(rate=self.net.rate, dt_bias=self.net.dt_bias, norm=self.norm_weight)
        self.gates = Gates(eps=delta.norm.eps, **{name: tensor.data_ptr() for name, tensor in pointers.items()})
        self.struct = half_of(self.norm, first=self.net.project, last=self.net.out)

    def forward(self, x: Tensor, kv: HybridKv, meta: Any) -> Tensor:
        if kv.native_step and meta.single_rows is None:
            states = kv.states.get_layer_state(self.net.index)
            slots = meta.single_slots.contiguous()
            return kv.native_step.delta_net(x, self.struct, self.gates, states, self.net.conv_weight, slots)
        return x + self.net(self.norm(x), kv, meta)


class PackedFeedForward(nn.Module):
    """The second half of a layer, in one call."""

    def __init__(self, layer: HybridDecoderLayer, pack: Pack, step: NativeStep) -> None:
        super().__init__()
        mlp, norm = cast(SwiGLU, layer.mlp), layer.post_attention_layernorm
        self.norm, self.step = FastNorm(norm.weight.data, norm.eps), step
        self.gate, self.up, self.down = (
            pack(one.weight.data, None) for one in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        )
        self.struct = half_of(self.norm, first=self.gate, second=self.up, last=self.down)

    def forward(self, x: Tensor) -> Tensor:
        return self.step.feed_forward(x, self.struct)


class PackedHybridLayer(nn.Module):
    """A decoder layer in two halves. A half that is one call adds its result to x in place."""

    def __init__(self, layer: HybridDecoderLayer, pack: Pack, heads: int, step: NativeStep) -> None:
        super().__init__()
        self.attends = layer.attends
        if layer.attends:
            self.input_layernorm, self.self_attn = layer.input_layernorm, layer.self_attn
        else:
            self.delta_net = PackedDeltaNet(layer, pack, heads)
        self.feed_forward = PackedFeedForward(layer, pack, step)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: HybridKv, meta: Any) -> Tensor:
        if self.attends:
            x = x + self.self_attn(self.input_layernorm(x), cos, sin, kv, meta)
        else:
            x = self.delta_net(x, kv, meta)
        return self.feed_forward(x)


def half_of(norm: "FastNorm", **linears: nn.Module) -> Half:
    """Return the struct of half a layer; the modules must outlive it."""
    packed = {name: cast(PackedLinear, linear) for name, linear in linears.items()}
    matrices = {name: linear.matrix for name, linear in packed.items()}
    hidden, width = packed["first"].packed.in_features, packed["last"].packed.in_features
    return Half(hidden=hidden, width=width, norm=norm.scale.data_ptr(), eps=norm.eps, **matrices)


def joined(*linears: nn.Linear) -> Tensor:
    """Return one matrix whose outputs are those of `linears`, one after the other; their own weights are released."""
    weight = torch.cat([linear.weight.data for linear in linears])
    for linear in linears:
        del linear.weight
    return weight


class FastNorm(nn.Module):
    """A zero-centred norm in one operation, in float32; `1 + weight` is computed once."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.scale, self.eps = weight, 1.0 + weight.float(), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (len(self.scale),), self.scale, self.eps).to(x.dtype)


def speed_up_hybrid(
    model: HybridForCausalLM | FastHybridForCausalLM, backend: str = "auto", exchange: Exchange = WHOLE
) -> FastHybridForCausalLM:
    """Return a fast model that takes over the weights of `model`; `model` cannot run afterwards.

    Args:
        backend: "packed" (lesson 9's C++), "torch", or "auto": the first that works on this machine.
        exchange: as for lesson 9's `speed_up`.

    Raises:
        UserError: the backend does not exist, or does not work here; `model` is unchanged.
    """
    check_backend(backend)
    if isinstance(model, FastHybridForCausalLM):
        return model
    functions = functions_for(model, backend)
    if functions is None:
        return _with_torch(model, exchange)
    return _with_packed(model, functions, exchange)


def _with_torch(model: HybridForCausalLM, exchange: Exchange) -> FastHybridForCausalLM:
    """Use torch's layers, joined where they share an input."""
    join_layers(model, TorchLinear, exchange)
    return FastHybridForCausalLM(model, TorchLinear(model.head_weight.data), None)


def join_layers(model: HybridForCausalLM, pack: Pack, exchange: Exchange) -> None:
    """Replace the matrices of all layers, joined where they share an input, and fuse the norms."""
    heads = model.config.linear_num_value_heads
    for layer in cast(Iterable[HybridDecoderLayer], model.model.layers):
        layer.mlp = FastSwiGLU(cast(SwiGLU, layer.mlp), pack, exchange)
        if layer.attends:
            layer.self_attn.o_proj = Summed(layer.self_attn.o_proj, exchange)
        else:
            layer.linear_attn = FastDeltaNet(cast(GatedDeltaNet, layer.linear_attn), pack, heads, exchange)
    replace_rest(model, pack)


def _with_packed(model: HybridForCausalLM, functions: native.Functions, exchange: Exchange) -> FastHybridForCausalLM:
    """Use lesson 9's packed layers. A tied head is also the embedding, which reads its rows from the tiles."""
    step = NativeStep(model.config, model.dtype)
    head = PackedLinear(functions, model.head_weight.data)
    if model.config.tie_word_embeddings:
        model.model.embed_tokens = RowsOf(head)

    def pack(weight: Tensor, bias: Tensor | None) -> nn.Module:
        return PackedLinear(functions, weight, bias)

    if exchange is not WHOLE:  # the exchange comes in the middle of such a call
        join_layers(model, pack, exchange)
        return FastHybridForCausalLM(model, head, step)
    heads, loaded = model.config.linear_num_value_heads, cast(Iterable[HybridDecoderLayer], model.model.layers)
    model.model.layers = nn.ModuleList(PackedHybridLayer(layer, pack, heads, step) for layer in loaded)
    replace_rest(model, pack)
    return FastHybridForCausalLM(model, head, step)


def replace_rest(model: HybridForCausalLM, pack: Pack) -> None:
    """Pack the remaining linear layers, those of attention, and fuse the norms."""
    for module in list(model.model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, pack(child.weight.data, child.bias))
            elif isinstance(child, ZeroCentredRMSNorm):
                setattr(module, name, FastNorm(child.weight.data, child.eps))


def native_step_for(model: nn.Module) -> NativeStep | None:
    """Return the C++ step of delta nets if the model's layers are packed; None: the store uses its own."""
    return model.native_step if isinstance(model, FastHybridForCausalLM) else None
