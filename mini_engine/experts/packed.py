"""Course machinery. Experts over lesson 9's packed weights, all of a layer in one call of `experts.cpp`."""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor, nn

from mini_engine.base.native_build import Library, Signature
from mini_engine.experts.experts import Experts, weighted_sum
from mini_engine.layers.native import Matrix
from mini_engine.layers.packed_layers import PackedLinear
from mini_engine.layers.packed_step import alloc_padded

HERE = Path(__file__).parent
SOURCES = (
    HERE / "experts.cpp",
    *(HERE.parent / "layers" / name for name in ("fused.h", "linear.h")),
    HERE.parent / "attention" / "vectors.h",
)


class Expert(ctypes.Structure):
    """One expert's weights; `experts.cpp` has the same struct."""

    _fields_ = tuple((name, Matrix) for name in ("gate", "up", "down"))


class Work(ctypes.Structure):
    """A layer's experts and a step's activations; `experts.cpp` has the same struct."""

    _fields_ = (
        *(("experts", POINTER(Expert)), ("ends", c_void_p)),
        *((name, c_int64) for name in ("count", "hidden", "width")),
        *((name, c_void_p) for name in ("x", "activated", "results")),
        *((name, c_int64) for name in ("x_stride", "activated_stride", "results_stride")),
    )


LIBRARY = Library(SOURCES, {"experts": Signature((POINTER(Work), c_int), None)}, "the packed backend", "use torch's")


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
        self.first, self.hidden, self.width, self.dtype = experts.first, down.shape[1], down.shape[2], down.dtype
        self.function = LIBRARY.function("experts", self.dtype)
        three = [[*map(linear, weights)] for weights in (gate_up[:, : self.width], gate_up[:, self.width :], down)]
        self.matrices = nn.ModuleList(layer for layers in three for layer in layers)  # own the memory behind structs
        structs = [Expert(gate.matrix, up.matrix, down.matrix) for gate, up, down in zip(*three, strict=True)]
        self.structs = (Expert * len(structs))(*structs)
        del experts.gate_up_proj, experts.down_proj

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Compute as `Experts` does."""
        return weighted_sum(x, experts - self.first, weights, len(self.structs), self.run)

    def run(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return the results of rows `[N, H]` that are sorted by expert; 0 behind the last expert's rows.

        Raises:
            ValueError: the rows are not this layer's.
        """
        if rows.dtype != self.dtype or rows.shape[1:] != (self.hidden,):
            raise ValueError(f"rows are {rows.dtype} {list(rows.shape)}; they must be {self.dtype} [N, {self.hidden}]")
        x, activated = alloc_padded(rows, self.hidden).copy_(rows), alloc_padded(rows, self.width)
        results = torch.zeros_like(rows)
        work = Work(experts=self.structs, ends=ends.data_ptr(), count=len(ends), hidden=self.hidden, width=self.width)
        for name, tensor in (("x", x), ("activated", activated), ("results", results)):
            setattr(work, name, tensor.data_ptr())
            setattr(work, f"{name}_stride", tensor.stride(0))
        self.function(work, torch.get_num_threads())
        return results
