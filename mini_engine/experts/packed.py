"""Course machinery. Experts over lesson 9's packed weights, all of a layer in one call of `experts.cpp`."""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_int, c_int64, c_void_p, pointer
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mini_engine.base.native_build import Library, Signature
from mini_engine.experts.experts import Experts
from mini_engine.layers.native import Matrix, Place
from mini_engine.layers.packed_layers import PackedLinear
from mini_engine.layers.packed_step import alloc_padded, memory

HERE = Path(__file__).parent
SOURCES = (
    HERE / "experts.cpp",
    *(HERE.parent / "layers" / name for name in ("fused.h", "linear.h")),
    HERE.parent / "attention" / "vectors.h",
)


class Expert(ctypes.Structure):
    """One expert's weights; `experts.cpp` has the same struct."""

    _fields_ = (*((name, Matrix) for name in ("gate", "up", "down")), ("width", c_int64))


class Work(ctypes.Structure):
    """A layer's experts and a step's activations; `experts.cpp` has the same struct."""

    _fields_ = (
        *((name, POINTER(Expert)) for name in ("experts", "shared")),
        *((name, c_void_p) for name in ("choices", "weights", "shared_weights")),
        *((name, c_int64) for name in ("count", "rows", "chosen", "hidden")),
        *((name, Place) for name in ("x", "out", "sorted", "active", "results")),
        ("adds", c_int64),
    )


LIBRARY = Library(SOURCES, {"experts": Signature((POINTER(Work), c_int), None)}, "the packed backend", "use torch's")


class PackedExperts(nn.Module):
    """Experts whose weights are packed in place.

    Args:
        experts: gives up its weights. linear: packs a matrix.
        shared: the expert for all rows, a SwiGLU, which gives up its weights, too; None if there is none.

    Raises:
        UserError: the library cannot be built here.
    """

    def __init__(self, experts: Experts, linear: Callable[[Tensor], PackedLinear], shared: Any = None) -> None:
        super().__init__()
        gate_up, down = experts.gate_up_proj.data, experts.down_proj.data
        self.first, self.hidden, self.dtype = experts.first, down.shape[1], down.dtype
        self.function = LIBRARY.function("experts", self.dtype)
        width = down.shape[2]
        three = [[*map(linear, weights)] for weights in (gate_up[:, :width], gate_up[:, width:], down)]
        self.matrices = nn.ModuleList(layer for layers in three for layer in layers)  # own the memory behind structs
        structs = [struct_of(*matrices) for matrices in zip(*three, strict=True)]
        self.structs = (Expert * len(structs))(*structs)
        self.shared = None
        if shared is not None:
            three = [linear(layer.weight.data) for layer in (shared.gate_proj, shared.up_proj, shared.down_proj)]
            self.matrices.extend(three)
            self.shared = struct_of(*three)
            del shared.gate_proj, shared.up_proj, shared.down_proj
        self.width = max(width, 0 if self.shared is None else self.shared.width)
        del experts.gate_up_proj, experts.down_proj

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Compute as `Experts` does, without the expert for all rows."""
        out = torch.empty_like(x)
        self.run(Work(), x, out, experts, weights)
        return out

    def add_to(
        self, out: Tensor, x: Tensor, experts: Tensor, weights: Tensor, shared_weights: Tensor | None = None
    ) -> Tensor:
        """Add to `out` `[T, H]`, in place, what `forward` returns for x, and the result of the expert for all rows.

        Args:
            shared_weights: `[T, 1]` float32, of that expert; None: ones.
        """
        work = Work(adds=True)
        if self.shared is not None:
            work.shared = pointer(self.shared)
        if shared_weights is not None:
            work.shared_weights = shared_weights.data_ptr()
        self.run(work, x, out, experts, weights)
        return out

    def run(self, work: Work, x: Tensor, out: Tensor, experts: Tensor, weights: Tensor) -> None:
        """Complete the struct of a step, and compute.

        Raises:
            ValueError: the rows are not this layer's.
        """
        if x.dtype != self.dtype or x.shape[1:] != (self.hidden,) or x.stride(1) != 1:
            raise ValueError(f"rows are {x.dtype} {list(x.shape)}; they must be {self.dtype} [N, {self.hidden}]")
        choices = (experts - self.first if self.first else experts).contiguous()
        weights = weights.float().contiguous()
        room = x.new_empty(len(x) * (choices.shape[1] + 1), 0)
        buffers = [alloc_padded(room, width) for width in (self.hidden, self.width, self.hidden)]
        for name, rows in zip(("x", "out", "sorted", "active", "results"), (x, out, *buffers), strict=True):
            setattr(work, name, memory(rows))
        work.experts, work.count, work.hidden = self.structs, len(self.structs), self.hidden
        work.rows, work.chosen = choices.shape
        work.choices, work.weights = choices.data_ptr(), weights.data_ptr()
        self.function(work, torch.get_num_threads())


def struct_of(gate: PackedLinear, up: PackedLinear, down: PackedLinear) -> Expert:
    """Return the struct of an expert; the matrices must outlive it."""
    return Expert(gate.matrix, up.matrix, down.matrix, down.packed.in_features)
