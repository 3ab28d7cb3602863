"""Lesson 9. Decoder layers and vocabulary head over packed weights, run by `layers.cpp`.

The layers compute the same as lesson 0's. With a direct store, such as lesson 3's pool, and a kernel in C++, one call
runs all of them; any other store is called between the two halves of each layer.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mini_engine.attention.contract import Kernel
from mini_engine.kv.block_tensor import ForwardMeta
from mini_engine.kv.direct import LayerCache
from mini_engine.layers import native
from mini_engine.layers.exchange import WHOLE, Exchange
from mini_engine.layers.pack import PackedWeight
from mini_engine.layers.packed_norm import PackedNorm
from mini_engine.layers.packed_step import (
    Activations,
    Tables,
    alloc_padded,
    check_caches,
    contiguous,
    pool_struct,
    refuse_table,
    starts_of,
)
from mini_engine.model.causal_lm import CausalLM
from mini_engine.model.decoder import DecoderLayer
from mini_engine.model.qwen3 import KvStore


class PackedLinear(nn.Module):
    """`nn.Linear` over a packed weight, whose memory it takes over."""

    def __init__(self, functions: native.Functions, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.packed = PackedWeight(weight)
        self.bias = bias
        self.linear = functions.linear

    @property
    def weight(self) -> Tensor:
        """The packed tiles."""
        return self.packed.tiles

    @property
    def matrix(self) -> native.Matrix:
        """The struct that describes it to C++."""
        bias = None if self.bias is None else self.bias.data_ptr()
        return native.Matrix(tiles=self.packed.tiles.data_ptr(), bias=bias, outputs=self.packed.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[T, in_features]` of the weight's dtype to `[T, out_features]`. Rows do not affect each other."""
        if x.shape[1:] != (self.packed.in_features,) or x.dtype != self.packed.tiles.dtype:
            raise ValueError(
                f"x is {x.dtype} {list(x.shape)}; this layer takes {self.packed.tiles.dtype} "
                f"[T, {self.packed.in_features}]"
            )
        if len(x) != 1 or not x.is_contiguous():
            x = alloc_padded(x, x.shape[1]).copy_(x)
        out = x.new_empty(len(x), self.packed.out_features)
        size = (len(x), x.shape[1], x.stride(0))
        self.linear(x.data_ptr(), *size, self.matrix, out.data_ptr(), torch.get_num_threads())
        return out


class RowsOf(nn.Module):
    """An embedding that looks up its rows in a packed head: tied weights exist once."""

    def __init__(self, head: PackedLinear) -> None:
        super().__init__()
        self.rows = head.packed.rows

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.rows(token_ids)


def joined(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of one layer whose outputs are those of `linears` in turn. Their weights are released."""
    weight = torch.cat([linear.weight.data for linear in linears])
    bias = None if linears[0].bias is None else torch.cat([linear.bias.data for linear in linears])
    for linear in linears:
        del linear.weight
    return weight, bias


def take_linear(functions: native.Functions, owner: nn.Module, name: str) -> PackedLinear:
    """Remove the linear layer `name` from `owner` and pack its weight in place."""
    linear: nn.Linear = getattr(owner, name)
    delattr(owner, name)
    return PackedLinear(functions, linear.weight.data, linear.bias)


class PackedDecoderLayer(nn.Module):
    """Lesson 0's decoder layer in two calls; the store is called in between."""

    def __init__(self, functions: native.Functions, layer: DecoderLayer, shape: native.Shape) -> None:
        super().__init__()
        attention, mlp = layer.mixer, layer.mlp
        self.layer_idx, self.functions, self.shape = attention.layer_idx, functions, shape
        norms: dict[str, Any] = dict(
            input_norm=layer.input_layernorm,
            post_norm=layer.post_attention_layernorm,
            q_norm=attention.q_norm,
            k_norm=attention.k_norm,
        )
        norms = {name: norm for name, norm in norms.items() if not isinstance(norm, nn.Identity)}
        linears = {name: take_linear(functions, attention, f"{name}_proj") for name in ("q", "k", "v", "o")}
        linears |= {name: take_linear(functions, mlp, f"{name}_proj") for name in ("gate", "up", "down")}
        self.norms, self.linears = nn.ModuleDict(norms), nn.ModuleDict(linears)  # own the memory behind the struct
        matrices = {name: linear.matrix for name, linear in linears.items()}
        self.struct = native.Layer(**matrices, **{name: norm.weight.data_ptr() for name, norm in norms.items()})

    def forward(self, step: Activations, kv: KvStore, meta: Any) -> None:
        """Run `step.x` through the layer, in place."""
        arguments = (self.shape, self.struct, step.struct, torch.get_num_threads())
        self.functions.before_attention(*arguments)
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        q, k, v = step.qkv.view(len(step.x), -1, self.shape.dim).split((heads, kv_heads, kv_heads), dim=1)
        kv.set_kv(self.layer_idx, meta.slot_mapping, k, v)
        step.attended.copy_(kv.attend(self.layer_idx, q, meta).reshape(step.attended.shape))
        self.functions.after_attention(*arguments)


class PackedModel(nn.Module):
    """Decoder layers and the last norm of a loaded model, whose weights it takes over.

    Args:
        exchange: one that C++ can call.
    """

    def __init__(self, functions: native.Functions, model: CausalLM, exchange: Exchange = WHOLE) -> None:
        super().__init__()
        config = self.config = model.config
        self.functions, self.exchange = functions, exchange
        self.exchange_struct = native.exchange_struct(exchange, model.dtype)
        self.shape = native.Shape(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            dim=config.head_dim,
            intermediate=config.intermediate_size,
            eps=config.rms_norm_eps,
        )
        layers = [PackedDecoderLayer(functions, layer, self.shape) for layer in model.model.layers]
        self.layers = nn.ModuleList(layers)
        self.structs = (native.Layer * len(layers))(*(layer.struct for layer in layers))
        self.embed_tokens, self.rope = model.model.embed_tokens, model.model.rope
        self.norm = PackedNorm(functions, model.model.norm)
        self.seconds = torch.empty(0, native.NUM_TIMES, dtype=torch.float64)

    @contextmanager
    def timed(self) -> Iterator[Tensor]:
        """Yield seconds `[threads, len(native.PARTS)]` float64, to which each step in the `with` block adds its parts.

        Only steps that run all layers in one call are timed; a step on another number of threads is refused.
        """
        self.seconds = torch.zeros(torch.get_num_threads(), native.NUM_TIMES, dtype=torch.float64)
        try:
            yield self.seconds[:, : len(native.PARTS)]
        finally:
            self.seconds = self.seconds[:0]

    def forward(self, token_ids: Tensor, kv: KvStore, meta: Any, rows: Tensor | None = None) -> Tensor:
        """Return the normed hidden states `[R, hidden_size]` of `rows`, or of all tokens."""
        if rows is not None:  # None, too, for all rows in order: those of a step in which every sequence decodes
            rows = None if rows.tolist() == list(range(len(token_ids))) else rows.long()
        return self.run(self.embed_tokens(token_ids), kv, meta, rows)

    def run(self, x: Tensor, kv: KvStore, meta: Any, rows: Tensor | None) -> Tensor:
        """Run embedded tokens x `[T, hidden_size]` through the layers, in place; return these rows, or all, normed."""
        step = self.activations(x, meta)
        store: Any = kv
        if store.direct and store.kernel.native:
            return self.run_layers(step, store.layer_caches(meta), store.kernel, meta, rows)
        for layer in self.layers:
            layer(step, kv, meta)
        if self.exchange_struct.failed:
            self.exchange.check(self.exchange_struct.failed)
        return self.norm(x if rows is None else x[rows])

    def activations(self, x: Tensor, meta: Any) -> Activations:
        """Allocate the step's memory; ValueError if the plan is for another number of tokens."""
        num_slots = meta.slot_mapping.shape[-1]  # lesson 15's has a leading dimension for groups of layers
        if not len(meta.positions) == num_slots == len(x):
            raise ValueError(
                f"{len(x)} tokens, {len(meta.positions)} positions and {num_slots} slots; "
                "a plan has one of each for every token"
            )
        cos, sin = self.rope(meta.positions, x.dtype)
        return Activations(x, cos, sin, self.shape, self.exchange_struct)

    def run_layers(
        self, step: Activations, caches: Sequence[LayerCache], kernel: Kernel, meta: ForwardMeta, rows: Tensor | None
    ) -> Tensor:
        """Run layers and norm in one call; return `rows`, or all. Everything that C++ relies on is checked first.

        If each row is the last of its sequence, the last layer computes only K and V for all others.

        Raises:
            ValueError: slots or tables do not fit the caches, or the caches the model. Nothing is written.
        """
        starts, kv_lens = meta.cu_seqlens_q.contiguous(), meta.seq_lens_kv.contiguous()
        assert kernel.native is not None
        self.check_caches(step, caches, kernel, Tables(starts, starts, kv_lens))
        caches = contiguous(caches)
        sampled_starts = None if rows is None else starts_of(rows, starts)
        if rows is not None and sampled_starts is not None:
            step.keep(rows)
            rows = None
        tables = Tables(starts, starts if sampled_starts is None else sampled_starts, kv_lens)
        pool = pool_struct(kernel.native(self.functions.dtype), caches, tables, self.shape.dim**-0.5)
        threads = torch.get_num_threads()
        if len(self.seconds) not in (0, threads):
            raise ValueError(f"{threads} threads; `timed` has room for {len(self.seconds)}")
        step.struct.seconds = self.seconds.data_ptr() if len(self.seconds) else None
        model = self.shape, self.structs, len(self.structs), self.norm.weight.data_ptr()
        bad = self.functions.run_layers(*model, step.struct, pool, threads)
        refuse_table(bad, pool)
        if self.exchange_struct.failed:
            self.exchange.check(self.exchange_struct.failed)
        kept = step.normed[: step.struct.samples]
        return kept if rows is None else kept[rows]

    def check_caches(self, step: Activations, caches: Sequence[LayerCache], kernel: Kernel, tables: Tables) -> None:
        """Raise ValueError unless the caches fit this model, this step and the kernel."""
        num_heads = caches[0].k.shape[2] if caches else 0
        if len(caches) != len(self.structs) or num_heads != self.shape.kv_heads:
            raise ValueError(
                f"the store has {len(caches)} layers of {num_heads} heads; "
                f"this model needs {len(self.structs)} of {self.shape.kv_heads}"
            )
        check_caches(step.attended.view(len(step.x), self.shape.heads, self.shape.dim), caches, kernel, tables)
