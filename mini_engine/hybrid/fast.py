"""Lesson 11. A hybrid with lesson 9's linear layers: packed matrices, joined where they have one input.

In a decode step everything between the two matrices of a delta net is one call of `native.py`. Prompts take the store's
own scan. Attention stays as it is.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.cpu.model import check_backend, functions_for
from mini_engine.cpu.packed_layers import PackedLinear
from mini_engine.cpu.torch_layers import TorchLinear
from mini_engine.hybrid.model import (
    GatedDeltaNet,
    HybridDecoderLayer,
    HybridForCausalLM,
    HybridStore,
    ZeroCentredRMSNorm,
)
from mini_engine.hybrid.native import Gates, NativeStep
from mini_engine.hybrid.store import HybridKv
from mini_engine.model.layers import SwiGLU

Pack = Callable[[Tensor, Tensor | None], nn.Module]


class FastHybridForCausalLM(HybridForCausalLM):
    """The model that `speed_up_hybrid` returns. `head` turns normed rows into logits."""

    def __init__(self, model: HybridForCausalLM, head: nn.Module) -> None:
        nn.Module.__init__(self)  # the base class would build the layers that these replace
        self.config, self.model, self.head = model.config, model.model, head

    def forward(self, token_ids: Tensor, kv: HybridStore, meta: Any, rows: Tensor | None = None) -> Tensor:
        """Compute logits as in lesson 0."""
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

    def __init__(self, mlp: SwiGLU, pack: Pack) -> None:
        super().__init__()
        self.gate_up, self.down = pack(joined(mlp.gate_proj, mlp.up_proj), None), pack(mlp.down_proj.weight.data, None)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))


class FastDeltaNet(nn.Module):
    """A delta net with its four projections in one matrix. In a decode step all between the matrices is one call."""

    def __init__(self, layer: GatedDeltaNet, pack: Pack, heads: int) -> None:
        super().__init__()
        self.index, self.norm, self.conv_weight = layer.index, layer.norm, layer.conv1d.weight.data[:, 0].contiguous()
        self.rate, self.dt_bias = layer.A_log.data.float().exp(), layer.dt_bias.data.float()
        self.norm_weight = layer.norm.weight.data.float()
        self.sizes = (len(self.conv_weight), heads * layer.head_dim, heads, heads)
        four = (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a)
        self.project, self.out = pack(joined(*four), None), pack(layer.out_proj.weight.data, None)
        pointers = {name: getattr(self, name).data_ptr() for name in ("rate", "dt_bias")}
        self.gates = Gates(norm=self.norm_weight.data_ptr(), eps=layer.norm.eps, **pointers)

    def forward(self, x: Tensor, kv: HybridStore, meta: Any) -> Tensor:
        projected = self.project(x)
        if isinstance(kv, HybridKv) and kv.native_step and meta.single_rows is None:
            states = kv.states.get_layer_state(self.index)
            slots = meta.single_slots
            return self.out(kv.native_step.layer(*states, projected, self.conv_weight, slots, self.gates))
        qkv, z, b, a = projected.split(self.sizes, dim=-1)
        g = -self.rate * F.softplus(a.float() + self.dt_bias)
        out = kv.scan(self.index, qkv, g, b.sigmoid(), self.conv_weight, meta)
        return self.out(self.norm(out, z.reshape(out.shape)).reshape(len(x), -1))


def joined(*linears: nn.Linear) -> Tensor:
    """Return one matrix whose outputs are those of `linears`, one after the other; their own weights are released."""
    weight = torch.cat([linear.weight.data for linear in linears])
    for linear in linears:
        del linear.weight
    return weight


class FastNorm(nn.Module):
    """A zero-centred norm in one operation, in float32; `1 + weight` is added up once."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.scale, self.eps = weight, 1.0 + weight.float(), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (len(self.scale),), self.scale, self.eps).to(x.dtype)


def speed_up_hybrid(model: HybridForCausalLM, backend: str = "auto") -> HybridForCausalLM:
    """Return a fast model that takes over the weights of `model`, which cannot run afterwards.

    Args:
        backend: "packed" (lesson 9's C++), "torch", or "auto": the first that works on this machine.

    Raises:
        UserError: the backend does not exist, or does not work here; `model` is unchanged.
    """
    check_backend(backend)
    if isinstance(model, FastHybridForCausalLM):
        return model
    functions = functions_for(model, backend)
    if functions is None:
        return _packed(model, TorchLinear, TorchLinear(model.head_weight.data))
    head = PackedLinear(functions, model.head_weight.data)
    if model.config.tie_word_embeddings:
        model.model.embed_tokens = RowsOf(head)
    return _packed(model, lambda weight, bias: PackedLinear(functions, weight, bias), head)


def _packed(model: HybridForCausalLM, pack: Pack, head: nn.Module) -> FastHybridForCausalLM:
    """Pack every linear layer but the head, which is packed already; join those with one input; fuse the norms."""
    heads = model.config.linear_num_value_heads
    for layer in model.model.layers:
        assert isinstance(layer, HybridDecoderLayer)
        layer.mlp = FastSwiGLU(cast(SwiGLU, layer.mlp), pack)
        if not layer.attends:
            layer.linear_attn = FastDeltaNet(cast(GatedDeltaNet, layer.linear_attn), pack, heads)
    for module in list(model.model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, pack(child.weight.data, child.bias))
            elif isinstance(child, ZeroCentredRMSNorm):
                setattr(module, name, FastNorm(child.weight.data, child.eps))
    return FastHybridForCausalLM(model, head)


def native_step_for(model: HybridForCausalLM) -> NativeStep | None:
    """Return the C++ step of delta nets if the model's layers are packed, otherwise None: the store has its own."""
    is_packed = isinstance(getattr(model, "head", None), PackedLinear)
    return NativeStep(model.config, model.dtype) if is_packed else None
