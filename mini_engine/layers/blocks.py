"""Course machinery. What lies around a mixer in one call of `blocks.cpp` each, for families whose layers are several.

Lesson 9 runs all layers of a Qwen3 in one call. Other mixers, norms behind a mixer, or another activation take a call
in front of the mixer and one behind it.
"""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.base.native_build import Library, Signature
from mini_engine.layers.native import Matrix, Place, Pool
from mini_engine.layers.packed_layers import PackedLinear
from mini_engine.layers.packed_step import alloc_padded, memory, once

HERE = Path(__file__).parent
SOURCES = (
    *(HERE / name for name in ("blocks.cpp", "blocks.h", "fused.h", "linear.h", "pool.h")),
    *(HERE.parent / "attention" / name for name in ("paged_cpu.h", "vectors.h")),
)


class Norm(ctypes.Structure):
    """A norm with a float32 weight; null: none."""

    _fields_ = (("weight", c_void_p), ("eps", c_float))


class EntryRows(ctypes.Structure):
    """A step's activations in front of a mixer."""

    _fields_ = (("rows", c_int64), *((name, Place) for name in ("x", "normed", "out")))


class Angles(ctypes.Structure):
    """A step's angles."""

    _fields_ = (("turned", c_int64), *((name, c_void_p) for name in ("cos", "sin")), ("has_floats", c_int64))


class Entry(ctypes.Structure):
    """A mixer's input."""

    _fields_ = (
        *(("at", EntryRows), ("angles", Angles), ("hidden", c_int64)),
        *(("norm", Norm), ("matrix", Matrix)),
        *((name, c_int64) for name in ("heads", "dim")),
        ("head_norm", Norm),
    )


class Heads(ctypes.Structure):
    """The heads of queries, those of keys, and their size."""

    _fields_ = tuple((name, c_int64) for name in ("heads", "kv_heads", "dim"))


class Mixer(ctypes.Structure):
    """What the outputs of an entry are, if they are attention's."""

    _fields_ = (("heads", Heads), *((name, c_int64) for name in ("gates", "layer")))


class Half(ctypes.Structure):
    """A matrix whose result is added to x."""

    _fields_ = (*((name, c_int64) for name in ("hidden", "width")), ("after", Norm), ("matrix", Matrix))


class Finish(ctypes.Structure):
    """A mixer's last matrix, and a feed-forward block."""

    _fields_ = (
        *(("mixer", Half), ("last", Half), ("norm", Norm)),
        *(("gate", Matrix), ("up", Matrix), ("has_gelu", c_int64)),
    )


class FinishRows(ctypes.Structure):
    """A step's activations behind a mixer."""

    _fields_ = (("rows", c_int64), *((name, Place) for name in ("x", "normed", "active", "delta")))


FUNCTIONS = {
    "enter": Signature((POINTER(Entry), c_int), None),
    "mix": Signature((POINTER(Entry), POINTER(Mixer), POINTER(Pool), POINTER(Place), c_int), None),
    "bad_table": Signature((POINTER(Pool), c_int)),
    "finish": Signature((POINTER(Finish), POINTER(FinishRows), POINTER(Place), c_int), None),
}
LIBRARY = Library(SOURCES, FUNCTIONS, "the packed backend", "the torch backend takes any dtype")


def scale_of(norm: Any) -> Tensor:
    """Return what a norm multiplies by, in float32."""
    return norm.scale if hasattr(norm, "scale") else norm.weight.data.float()


class PackedEntry(nn.Module):
    """A mixer's input in one call: norm and a packed matrix, then norm and RoPE of the first heads of its outputs.

    Args:
        norm: of x. linear: takes the normed x. head_norm: `[heads, D]`, multiplies the normed heads; None: heads are
            not normed. heads, dim: how many heads are rotated, and their size.
    """

    def __init__(
        self,
        norm: Any,
        linear: PackedLinear,
        heads: int = 0,
        dim: int = 0,
        head_norm: Tensor | None = None,
        head_eps: float = 0.0,
    ) -> None:
        super().__init__()
        self.linear, self.scale = linear, scale_of(norm)
        self.head_scale = None if head_norm is None else head_norm.float()
        self.function = LIBRARY.function("enter", linear.weight.dtype)
        self.struct = Entry(
            hidden=linear.packed.in_features,
            norm=Norm(self.scale.data_ptr(), norm.eps),
            matrix=linear.matrix,
            heads=heads,
            dim=dim,
        )
        if self.head_scale is not None:
            self.struct.head_norm = Norm(self.head_scale.data_ptr(), head_eps)

    def forward(self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None) -> Tensor:
        """Map x `[T, in_features]` to `[T, out_features]`.

        Args:
            cos, sin: `[T, R]`, contiguous, of x's dtype or float32; the first R dimensions of a head are rotated.
        """
        check_rows(x, self.linear)
        out, normed = x.new_empty(len(x), self.linear.packed.out_features), alloc_padded(x, x.shape[1])
        if cos is not None and sin is not None:
            self.struct.angles = angles_of(cos, sin, self.struct.dim)
        self.struct.at = EntryRows(len(x), memory(x), memory(normed), memory(out))
        self.function(self.struct, torch.get_num_threads())
        return out


class PackedFinish(nn.Module):
    """What follows a mixer: its last matrix and a dense feed-forward block, each added to x; norms behind both or none.

    Args:
        out: the mixer's last matrix. norm: in front of the feed-forward block `mlp`, whose matrices `matrix` makes.
        after: the norms of what is added to x, of the mixer and of the block.
    """

    def __init__(
        self, out: PackedLinear, norm: Any, mlp: Any, matrix: Callable[..., Any], after: tuple[Any, ...] = (None, None)
    ) -> None:
        super().__init__()
        self.out = out
        self.gate, self.up, self.down = matrix(mlp.gate_proj), matrix(mlp.up_proj), matrix(mlp.down_proj)
        self.scale = scale_of(norm)
        self.after = [None if one is None else scale_of(one) for one in after]
        halves = (half_of(*parts) for parts in zip((out, self.down), self.after, after, strict=True))
        self.struct = Finish(
            *halves,
            norm=Norm(self.scale.data_ptr(), norm.eps),
            gate=self.gate.matrix,
            up=self.up.matrix,
            has_gelu=mlp.act is not F.silu,
        )
        self.widths = (out.packed.in_features, self.down.packed.in_features, out.weight.dtype)
        self.function = LIBRARY.function("finish", out.weight.dtype)

    def forward(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Add both results to x `[T, hidden_size]`, in place. mixed: `[T, …]`, the mixer's.

        Raises:
            ValueError: the rows are not this layer's. Nothing is written.
        """
        place, (rows, *_) = once(mixed, self.widths, self.place_of), once(x, self.widths, self.rows_of)
        if len(mixed) != rows.rows:
            raise ValueError(f"the mixer has {len(mixed)} results for {rows.rows} rows; give one for each")
        self.function(self.struct, rows, place, torch.get_num_threads())
        return x

    def place_of(self, mixed: Tensor) -> Place:
        """Check a mixer's results, and describe them to C++."""
        check_rows(mixed, self.out)
        return memory(mixed)

    def rows_of(self, x: Tensor) -> tuple[FinishRows, Any]:
        """Check x, and return its rows for C++, and the memory of those that layers of these widths overwrite."""
        check_rows(x, self.gate)
        parts = [alloc_padded(x, width) for width in (x.shape[1], self.down.packed.in_features, x.shape[1])]
        return FinishRows(len(x), *map(memory, (x, *parts))), parts


def normed(norm: nn.Module, linear: nn.Module) -> nn.Module:
    """Return a norm and a linear layer behind it, in one call if the layer is packed."""
    return PackedEntry(norm, linear) if isinstance(linear, PackedLinear) else nn.Sequential(norm, linear)


def half_of(linear: PackedLinear, scale: Tensor | None = None, norm: Any = None) -> Half:
    """Return the struct of a matrix whose result is added to x; the modules must outlive it."""
    after = Norm() if scale is None else Norm(scale.data_ptr(), norm.eps)
    sizes = dict(hidden=linear.packed.out_features, width=linear.packed.in_features)
    return Half(matrix=linear.matrix, after=after, **sizes)


def angles_of(cos: Tensor, sin: Tensor, dim: int) -> Angles:
    """Return a step's angles as C++ takes them; ValueError if it cannot read them. dim: of the heads that turn."""
    if not (cos.is_contiguous() and sin.is_contiguous() and cos.shape == sin.shape and cos.shape[1] <= dim):
        raise ValueError(
            f"cos and sin are {list(cos.shape)} and {list(sin.shape)}; they must be contiguous, and as wide as "
            f"what turns of a head's {dim} dimensions"
        )
    return Angles(cos.shape[1], cos.data_ptr(), sin.data_ptr(), cos.dtype == torch.float32)


def check_rows(x: Tensor, linear: PackedLinear) -> None:
    """Raise ValueError unless the rows x fit a matrix, and each is contiguous."""
    inputs, dtype = linear.packed.in_features, linear.packed.tiles.dtype
    if x.shape[1:] != (inputs,) or x.dtype != dtype or x.stride(1) != 1:
        raise ValueError(f"x is {x.dtype} {list(x.shape)}; this layer takes {dtype} [T, {inputs}]")
