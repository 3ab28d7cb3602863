"""Lesson 9. Decoder layers and vocabulary head over packed weights, run by `layers.cpp`.

The layers compute what lesson 0's do. With lesson 3's pool and its C++ kernel one call runs all of them; any other
store is called between the two halves of each layer.
"""

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.attention.contract import Kernel, check_inputs
from mini_engine.attention.cpu import c_function
from mini_engine.cpu import native
from mini_engine.cpu.pack import PackedWeight
from mini_engine.kv.block_tensor import ForwardMeta, KvPool
from mini_engine.model.layers import rope_cos_sin
from mini_engine.model.qwen3 import KvStore, Qwen3DecoderLayer, Qwen3ForCausalLM

LINE_BYTES = 64


def apart(like: Tensor, width: int) -> Tensor:
    """Allocate len(like) rows of `width` that start an odd number of cache lines apart.

    A cache finds its lines by the lower bits of their addresses. Rows a power of two apart share those bits, so a dozen
    of them evict each other from the first-level cache.
    """
    size = like.element_size()
    lines = -(-width * size // LINE_BYTES) | 1
    return like.new_empty(len(like), lines * LINE_BYTES // size)[:, :width]


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
        return native.Matrix(self.packed.tiles.data_ptr(), bias, self.packed.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """x `[T, in_features]` in the weight's dtype -> `[T, out_features]`; rows do not affect each other's bits."""
        if x.shape[1:] != (self.packed.in_features,) or x.dtype != self.packed.tiles.dtype:
            raise ValueError(
                f"x is {x.dtype} {list(x.shape)}; this layer takes {self.packed.tiles.dtype} "
                f"[T, {self.packed.in_features}]"
            )
        x = apart(x, x.shape[1]).copy_(x)
        out = x.new_empty(len(x), self.packed.out_features)
        size = (len(x), x.shape[1], x.stride(0))
        self.linear(x.data_ptr(), *size, self.matrix, out.data_ptr(), torch.get_num_threads())
        return out


class Activations:
    """The memory of one step over T tokens, shared by all layers, and the struct that describes it to C++."""

    def __init__(self, x: Tensor, cos: Tensor, sin: Tensor, slot_mapping: Tensor, shape: native.Shape) -> None:
        width = (shape.heads + 2 * shape.kv_heads) * shape.dim
        self.x, self.cos, self.sin = x, cos, sin
        self.slots = slot_mapping.contiguous()
        self.qkv = x.new_empty(len(x), width)
        self.normed = apart(x, shape.hidden)
        self.attended = apart(x, shape.heads * shape.dim)
        self.activated = apart(x, shape.intermediate)
        rows = (
            native.Memory(r.data_ptr(), r.stride(0)) for r in (x, self.normed, self.qkv, self.attended, self.activated)
        )
        self.struct = native.Step(len(x), *rows, *(r.data_ptr() for r in (cos, sin, self.slots)))

    def keep(self, rows: Tensor) -> None:
        """Make the last layer continue with `rows` only; their results move to the front."""
        self.sampled = rows.contiguous()
        self.struct.sampled, self.struct.samples = self.sampled.data_ptr(), len(rows)


def starts_of(rows: Tensor, cu_seqlens_q: Tensor) -> Tensor | None:
    """Return `cu_seqlens_q` for `rows` only, or None unless each is the last of its sequence and they are in order.

    The last row of a sequence sees all its keys, as in decode, so attention needs to know only which rows there are.
    """
    ends = cu_seqlens_q[1:].long() - 1
    chosen = torch.isin(ends, rows) & (ends >= cu_seqlens_q[:-1])
    if not torch.equal(ends[chosen], rows):
        return None
    return F.pad(chosen.cumsum(0), (1, 0)).int()


class PackedDecoderLayer(nn.Module):
    """Lesson 0's decoder layer in two calls; the store is called in between."""

    def __init__(self, functions: native.Functions, layer: Qwen3DecoderLayer, shape: native.Shape) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx, self.functions, self.shape = attention.layer_idx, functions, shape
        norms = (layer.input_layernorm, layer.post_attention_layernorm, attention.q_norm, attention.k_norm)
        self.norms = nn.ModuleList(norms)
        self.linears = nn.ModuleList()
        for owner in (attention, mlp):
            for name in [name for name, module in owner.named_children() if isinstance(module, nn.Linear)]:
                linear = getattr(owner, name)
                self.linears.append(PackedLinear(functions, linear.weight.data, linear.bias))
                delattr(owner, name)  # its rows no longer exist
        matrices = (linear.matrix for linear in self.linears)
        self.struct = native.Layer(*matrices, *(norm.weight.data_ptr() for norm in norms))

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
    """Decoder layers and the last norm of a loaded model, whose weights it takes over."""

    def __init__(self, functions: native.Functions, model: Qwen3ForCausalLM) -> None:
        super().__init__()
        config = self.config = model.config
        self.functions = functions
        self.shape = native.Shape(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.intermediate_size,
            config.rms_norm_eps,
        )
        self.layers = nn.ModuleList(PackedDecoderLayer(functions, layer, self.shape) for layer in model.model.layers)
        self.structs = (native.Layer * len(self.layers))(*(layer.struct for layer in self.layers))
        self.norm = model.model.norm

    def forward(self, x: Tensor, kv: KvStore, meta: Any, rows: Tensor | None = None) -> Tensor:
        """Run embedded tokens x `[T, hidden_size]` through the layers, in place; return the given `rows`, or all."""
        step = self.activations(x, meta)
        rows = torch.arange(len(x)) if rows is None else rows.long()
        if isinstance(kv, KvPool) and isinstance(kv.kernel, Kernel) and kv.kernel.name == "cpu":
            return self.run_layers(step, kv, meta, rows)
        for layer in self.layers:
            layer(step, kv, meta)
        return x[rows]

    def activations(self, x: Tensor, meta: Any) -> Activations:
        """Allocate the step's memory; ValueError if the plan is for another number of tokens."""
        if not len(meta.positions) == len(meta.slot_mapping) == len(x):
            raise ValueError(
                f"{len(x)} tokens, {len(meta.positions)} positions and {len(meta.slot_mapping)} slots; "
                "a plan has one of each for every token"
            )
        cos, sin = rope_cos_sin(meta.positions, self.config.head_dim, self.config.rope_theta, x.dtype)
        return Activations(x, cos, sin, meta.slot_mapping, self.shape)

    def run_layers(self, step: Activations, kv: KvPool, meta: ForwardMeta, rows: Tensor) -> Tensor:
        """Run all layers in one call and return `rows`. Everything that C++ relies on is checked before it starts.

        If each row is the last of its sequence, the last layer computes only K and V for all others.

        Raises:
            ValueError: the tables do not fit the pool.
        """
        q = step.qkv.view(len(step.x), -1, self.shape.dim)[:, : self.shape.heads]
        tables = [table.contiguous() for table in (meta.cu_seqlens_q, meta.seq_lens_kv, meta.block_table)]
        check_inputs(q, kv.K[0], kv.V[0], *tables)
        self.check_pool(kv, step.slots)
        starts = None if len(rows) == len(step.x) else starts_of(rows, tables[0])
        step.keep(torch.arange(len(step.x)) if starts is None else rows)
        tables.insert(1, tables[0] if starts is None else starts)
        pool = self.pool_struct(kv, tables, step)
        threads = torch.get_num_threads()
        foreign = self.functions.run_layers(self.shape, self.structs, len(self.layers), step.struct, pool, threads)
        if foreign >= 0:
            raise ValueError(f"block_table row {foreign} names a block outside the cache's 0 … {kv.num_blocks - 1}")
        return step.x[rows] if starts is None else step.x[: len(rows)]

    def pool_struct(self, kv: KvPool, tables: list[Tensor], step: Activations) -> native.Pool:
        """Return the arguments of lesson 3's kernel, which reads q in place, next to k and v."""
        kv_lens, table = tables[2:]
        caches = [(ctypes.c_void_p * len(side))(*(x.data_ptr() for x in side)) for side in (kv.K, kv.V)]
        num_blocks, block_size, kv_heads, dim = kv.K[0].shape
        layout = (self.shape.heads, kv_heads, dim, num_blocks, block_size, table.shape[1])
        size = (len(kv_lens), len(step.x), *layout, step.qkv.stride(0), step.attended.stride(0))
        return native.Pool(
            ctypes.cast(c_function(kv.K[0].dtype), ctypes.c_void_p),
            *caches,
            *(x.data_ptr() for x in tables),  # starts, sampled_starts, kv_lens, table
            (ctypes.c_int64 * 10)(*size),
            dim**-0.5,
        )

    def check_pool(self, kv: KvPool, slots: Tensor) -> None:
        """Raise ValueError unless the pool fits this model and contains all slots."""
        num_slots, rest = kv.num_blocks * kv.K[0].shape[1], (self.shape.kv_heads, self.shape.dim)
        if len(kv.K) != len(self.layers) or kv.K[0].shape[2:] != rest:
            raise ValueError(
                f"the pool has {len(kv.K)} layers of {list(kv.K[0].shape[2:])}; "
                f"this model has {len(self.layers)} of {list(rest)}"
            )
        if slots.dtype != torch.int64:
            raise ValueError(f"slot_mapping is {slots.dtype}; slots are int64")
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < num_slots:
            raise ValueError(f"slots {int(slots.min())} … {int(slots.max())} are not all in 0 … {num_slots - 1}")
