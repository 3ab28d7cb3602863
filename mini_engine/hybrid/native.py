"""Lesson 11. Python bindings of `hybrid_layers.cpp`: the step of delta nets, and halves of layers around it."""

import ctypes
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from mini_engine.base.native_build import Library, Signature
from mini_engine.hybrid.hybrid_config import HybridConfig
from mini_engine.layers.native import Matrix
from mini_engine.layers.packed_step import alloc_padded

HERE = Path(__file__).parent
SOURCES = (
    *(HERE / name for name in ("hybrid_layers.cpp", "gdn_step.h")),
    *(HERE.parent / "layers" / name for name in ("fused.h", "linear.h")),
    HERE.parent / "attention" / "vectors.h",
)


class StepSizes(ctypes.Structure):
    """The sizes of one step; `gdn_step.h` has the same struct."""

    _fields_ = tuple(
        (name, c_int64) for name in ("sequences", "key_heads", "value_heads", "key_dim", "value_dim", "taps", "stride")
    )


class Gates(ctypes.Structure):
    """Further inputs of a full delta-net call; `gdn_step.h` has the same struct."""

    _fields_ = (*((name, c_void_p) for name in ("z", "b", "a", "rate", "dt_bias", "norm")), ("eps", c_float))


class Half(ctypes.Structure):
    """Half a layer and its activations; `hybrid_layers.cpp` has the same struct. `describe` sets the activations."""

    _fields_ = (
        *((name, c_int64) for name in ("tokens", "hidden")),
        *((name, c_void_p) for name in ("x", "normed", "inner", "result")),
        *((name, c_int64) for name in ("x_stride", "normed_stride", "inner_stride", "result_stride")),
        ("norm", c_void_p),
        ("eps", c_float),
        *((name, Matrix) for name in ("first", "second", "last")),
        ("width", c_int64),
    )

    def describe(self, **activations: Tensor) -> None:
        """Point to this step's activations, `[T, width]` each."""
        for name, rows in activations.items():
            setattr(self, name, rows.data_ptr())
            setattr(self, f"{name}_stride", rows.stride(0))
        self.tokens = len(activations["x"])


POINTERS = [c_void_p] * 9
FUNCTIONS = {
    "gdn_step": Signature((POINTER(StepSizes), *POINTERS, c_int), None),
    "delta_net": Signature((POINTER(Half), POINTER(StepSizes), *POINTERS[:4], POINTER(Gates), c_int), None),
    "feed_forward": Signature((POINTER(Half), c_int), None),
}
LIBRARY = Library(SOURCES, FUNCTIONS, "the C++ step", "use the torch backend")


class NativeStep:
    """Advances states by one token: alone, with the same arguments as `HybridKv`'s own step, or in a layer.

    Raises:
        UserError: the dtype is not supported, or the library cannot be built here.
    """

    def __init__(self, config: HybridConfig, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.functions = {name: LIBRARY.function(name, dtype) for name in FUNCTIONS}
        self.sizes = dict(
            key_heads=config.linear_num_key_heads,
            value_heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            taps=config.linear_conv_kernel_dim,
        )
        self.hidden, self.conv_dim, self.value_dim = config.hidden_size, config.conv_dim, config.value_dim

    def __call__(
        self,
        recurrent: Tensor,
        conv: Tensor,
        qkv: Tensor,
        g: Tensor,
        beta: Tensor,
        weight: Tensor,
        sources: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """Return `[N, H_v, D_v]` in the dtype of `qkv`. States are read in `sources` and written to `slots`.

        Raises:
            ValueError: a slot is not in the pool, or dtypes or shapes are not this model's; nothing was written.
        """
        self.check(qkv, [len(slots), self.conv_dim], conv, slots)
        self.check(qkv, [len(sources), self.conv_dim], conv, sources)
        out = qkv.new_empty(len(slots), self.sizes["value_heads"], self.sizes["value_dim"])
        g, beta, weight = g.float().contiguous(), beta.float().contiguous(), weight.contiguous()
        sources, slots = sources.contiguous(), slots.contiguous()
        sizes = StepSizes(sequences=len(slots), stride=qkv.stride(0), **self.sizes)
        pointers = [x.data_ptr() for x in (qkv, g, beta, weight, conv, recurrent, sources, slots, out)]
        self.functions["gdn_step"](sizes, *pointers, torch.get_num_threads())
        return out

    def delta_net(
        self, x: Tensor, half: Half, gates: Gates, states: tuple[Tensor, Tensor], weight: Tensor, slots: Tensor
    ) -> Tensor:
        """Add a delta net's result to x `[N, hidden]`, in place: norm, projection, step, gate and output matrix.

        Args:
            half, gates: the layer's weights. states: recurrent and conv, the layer's own.
            weight: of the convolution, `[conv_dim, K]`. slots: `[N]` int64.

        Raises:
            ValueError: a slot is not in the pool, or the shapes are not this model's; nothing was written.
        """
        recurrent, conv = states
        self.check(x, [len(slots), self.hidden], conv, slots)
        projected = x.new_empty(len(x), half.first.outputs)  # qkv, z, b and a of each sequence, one after the other
        normed, result = alloc_padded(x, self.hidden), alloc_padded(x, self.value_dim)  # names keep the memory alive
        half.describe(x=x, normed=normed, inner=projected, result=result)
        size = x.element_size()
        gates.z = projected.data_ptr() + self.conv_dim * size
        gates.b = gates.z + self.value_dim * size
        gates.a = gates.b + self.sizes["value_heads"] * size
        sizes = StepSizes(sequences=len(x), stride=projected.stride(0), **self.sizes)
        pointers = [x.data_ptr() for x in (weight, conv, recurrent, slots)]
        self.functions["delta_net"](half, sizes, *pointers, gates, torch.get_num_threads())
        return x

    def feed_forward(self, x: Tensor, half: Half) -> Tensor:
        """Add the feed-forward block's result to x `[T, hidden]`, in place: norm, gate and up, SiLU, down.

        Raises:
            ValueError: x has another dtype or shape; nothing was written.
        """
        self.check_rows(x, [len(x), self.hidden])
        normed, result = alloc_padded(x, self.hidden), alloc_padded(x, half.width)
        half.describe(x=x, normed=normed, result=result)
        self.functions["feed_forward"](half, torch.get_num_threads())
        return x

    def check(self, rows: Tensor, shape: list[int], conv: Tensor, slots: Tensor) -> None:
        """Raise ValueError unless the rows have this shape and all slots are in the pool."""
        self.check_rows(rows, shape)
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < len(conv):
            raise ValueError(f"state slots {slots.tolist()} are not all in 0 … {len(conv) - 1}")

    def check_rows(self, rows: Tensor, shape: list[int]) -> None:
        """Raise ValueError unless the rows have this shape and the model's dtype, and each is contiguous."""
        if list(rows.shape) != shape or rows.dtype != self.dtype or rows.stride(1) != 1:
            raise ValueError(f"the rows are {rows.dtype} {list(rows.shape)}; they must be {self.dtype} {shape}")
