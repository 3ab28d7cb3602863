"""Lesson 11. Python's view of `gdn_step.cpp`: one token of each of N sequences through a gated delta net."""

import ctypes
import functools
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from mini_engine.errors import UserError
from mini_engine.hybrid.config import HybridConfig
from mini_engine.native_build import find_or_build

HERE = Path(__file__).parent
SOURCES = (
    HERE / "gdn_step.cpp",
    *(HERE.parent / "cpu" / name for name in ("fused.h", "linear.h")),
    HERE.parent / "attention" / "vectors.h",
)
FUNCTIONS = {torch.float32: "gdn_step_f32", torch.bfloat16: "gdn_step_bf16"}


class StepSizes(ctypes.Structure):
    """The sizes of one call; `gdn_step.cpp` has the same struct."""

    _fields_ = tuple(
        (name, c_int64) for name in ("sequences", "key_heads", "value_heads", "key_dim", "value_dim", "taps", "stride")
    )


class Gates(ctypes.Structure):
    """What a whole layer needs besides; `gdn_step.cpp` has the same struct."""

    _fields_ = (*((name, c_void_p) for name in ("z", "b", "a", "rate", "dt_bias", "norm")), ("eps", c_float))


class NativeStep:
    """Advances states by one token, in place, in one call per layer. Same arguments as `HybridKv`'s own step.

    Raises:
        UserError: there is no function for this dtype, or it cannot be built here.
    """

    def __init__(self, config: HybridConfig, dtype: torch.dtype) -> None:
        if dtype not in FUNCTIONS:
            raise UserError(f"the C++ step takes float32 and bfloat16, not {dtype}; use the torch backend")
        library = _library()
        if isinstance(library, UserError):
            raise UserError(str(library))
        self.dtype, self.function = dtype, getattr(library, FUNCTIONS[dtype])
        self.sizes = dict(
            key_heads=config.linear_num_key_heads,
            value_heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            taps=config.linear_conv_kernel_dim,
        )
        self.conv_dim = config.conv_dim

    def __call__(
        self, recurrent: Tensor, conv: Tensor, qkv: Tensor, g: Tensor, beta: Tensor, weight: Tensor, slots: Tensor
    ) -> Tensor:
        """Return `[N, H_v, D_v]` in the dtype of `qkv`.

        Raises:
            ValueError: a slot is not in the pool, or dtypes or shapes are not this model's; nothing was written.
        """
        count, heads, width = len(slots), self.sizes["value_heads"], self.sizes["value_dim"]
        if qkv.shape != (count, self.conv_dim) or qkv.dtype != self.dtype or qkv.stride(1) != 1:
            raise ValueError(f"qkv is {qkv.dtype} {list(qkv.shape)}; it must be {self.dtype} {[count, self.conv_dim]}")
        if count and not 0 <= int(slots.min()) <= int(slots.max()) < len(conv):
            raise ValueError(f"state slots {slots.tolist()} are not all in 0 … {len(conv) - 1}")
        out = qkv.new_empty(count, heads, width)
        g, beta, weight, slots = (
            g.float().contiguous(),
            beta.float().contiguous(),
            weight.contiguous(),
            slots.contiguous(),
        )
        sizes = StepSizes(sequences=count, stride=qkv.stride(0), **self.sizes)
        pointers = [x.data_ptr() for x in (qkv, g, beta, weight, conv, recurrent, slots, out)]
        self.function(sizes, *pointers, None, torch.get_num_threads())
        return out

    def layer(
        self, recurrent: Tensor, conv: Tensor, projected: Tensor, weight: Tensor, slots: Tensor, gates: Gates
    ) -> Tensor:
        """Run a whole layer between its two matrices, gates and norm included.

        Args:
            projected: `[N, conv_dim + H_v D_v + 2 H_v]`: qkv, z, b and a of each sequence, one after the other.
            gates: the layer's rates, biases and norm; its pointers into `projected` are set here.

        Returns:
            `[N, H_v D_v]`

        Raises:
            ValueError: a slot is not in the pool, or the shapes are not this model's; nothing was written.
        """
        heads, values = self.sizes["value_heads"], self.sizes["value_heads"] * self.sizes["value_dim"]
        width = self.conv_dim + values + 2 * heads
        if projected.shape != (len(slots), width) or projected.dtype != self.dtype or projected.stride(1) != 1:
            raise ValueError(f"the projection is {projected.dtype} {list(projected.shape)}, not {[len(slots), width]}")
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < len(conv):
            raise ValueError(f"state slots {slots.tolist()} are not all in 0 … {len(conv) - 1}")
        out = projected.new_empty(len(slots), values)
        start, size = projected.data_ptr(), projected.element_size()
        gates.z = start + self.conv_dim * size
        gates.b, gates.a = gates.z + values * size, gates.z + (values + heads) * size
        sizes = StepSizes(sequences=len(slots), stride=projected.stride(0), **self.sizes)
        pointers = [x.data_ptr() for x in (weight, conv, recurrent, slots, out)]
        self.function(sizes, start, None, None, *pointers, gates, torch.get_num_threads())
        return out


@functools.cache
def _library() -> ctypes.CDLL | UserError:
    """Return the library, or the reason why there is none: a process does not repeat a failed build."""
    try:
        return find_or_build(SOURCES, _open)
    except UserError as why:
        return why


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name in FUNCTIONS.values():
        function = getattr(library, name)
        function.argtypes, function.restype = (POINTER(StepSizes), *[c_void_p] * 8, POINTER(Gates), c_int), None
    return library
