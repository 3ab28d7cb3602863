"""Course machinery. Experts over lesson 9's packed weights, all of a layer in one call of `experts.cpp`.

`PackedExperts` is for a process that has a share of a layer's experts. Where it has all of them, `PackedSparse` is the
call, with all that follows the mixer.
"""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor, nn

from mini_engine.base.native_build import Library, Signature
from mini_engine.experts.experts import Experts
from mini_engine.layers.blocks import Half, Norm
from mini_engine.layers.native import Matrix, Place
from mini_engine.layers.packed_layers import PackedLinear
from mini_engine.layers.packed_step import alloc_padded, memory

HERE = Path(__file__).parent
SOURCES = (
    *(HERE / name for name in ("experts.cpp", "router.h")),
    *(HERE.parent / "layers" / name for name in ("blocks.h", "fused.h", "linear.h", "pool.h")),
    *(HERE.parent / "attention" / name for name in ("paged_cpu.h", "vectors.h")),
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


class Router(ctypes.Structure):
    """A router's matrix and rules; `router.h` has the same struct."""

    _fields_ = (
        ("matrix", Matrix),
        ("bias", c_void_p),
        *((name, c_int64) for name in ("has_sigmoids", "normalizes", "rounds", "groups", "kept", "judges")),
        *((name, c_float) for name in ("epsilon", "scale")),
    )


FUNCTIONS = {
    "experts": Signature((POINTER(Work), c_int), None),
    "finish": Signature((POINTER(Half), POINTER(Place), POINTER(Norm), POINTER(Router), POINTER(Work), c_int), None),
}
LIBRARY = Library(SOURCES, FUNCTIONS, "the packed backend", "use torch's")


class PackedExperts(nn.Module):
    """Experts whose weights are packed in place.

    Args:
        experts: gives up its weights. linear: packs a matrix.

    Raises:
        UserError: the library cannot be built here.
    """

    def __init__(self, experts: Experts, linear: Callable[[Tensor], PackedLinear]) -> None:
        super().__init__()
        gate_up, down = experts.gate_up_proj.data, experts.down_proj.data
        self.first, self.dtype = experts.first, down.dtype
        self.hidden, self.width = down.shape[1:]
        self.function = LIBRARY.function("experts", self.dtype)
        three = [[*map(linear, weights)] for weights in (gate_up[:, : self.width], gate_up[:, self.width :], down)]
        self.matrices = nn.ModuleList(layer for layers in three for layer in layers)  # own the memory behind structs
        structs = [struct_of(*matrices) for matrices in zip(*three, strict=True)]
        self.structs = (Expert * len(structs))(*structs)
        del experts.gate_up_proj, experts.down_proj

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Compute as `Experts` does.

        Raises:
            ValueError: the rows are not this layer's.
        """
        if x.dtype != self.dtype or x.shape[1:] != (self.hidden,) or x.stride(1) != 1:
            raise ValueError(f"rows are {x.dtype} {list(x.shape)}; they must be {self.dtype} [N, {self.hidden}]")
        choices, weights, out = (experts - self.first).contiguous(), weights.float().contiguous(), torch.empty_like(x)
        room = x.new_empty(len(x) * choices.shape[1], 0)
        buffers = [alloc_padded(room, width) for width in (self.hidden, self.width, self.hidden)]
        work = Work(experts=self.structs, count=len(self.structs), hidden=self.hidden)
        for name, rows in zip(("x", "out", "sorted", "active", "results"), (x, out, *buffers), strict=True):
            setattr(work, name, memory(rows))
        work.rows, work.chosen = choices.shape
        work.choices, work.weights = choices.data_ptr(), weights.data_ptr()
        self.function(work, torch.get_num_threads())
        return out


def struct_of(gate: PackedLinear, up: PackedLinear, down: PackedLinear) -> Expert:
    """Return the struct of an expert; the matrices must outlive it."""
    return Expert(gate.matrix, up.matrix, down.matrix, down.packed.in_features)
