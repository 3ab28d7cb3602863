"""Course machinery. All that follows a mixer in a layer with experts, in one call of `experts.cpp`."""

from collections.abc import Callable
from ctypes import pointer
from typing import Any

import torch
from torch import Tensor, nn

from mini_engine.experts.feed_forward import SparseFeedForward
from mini_engine.experts.packed import LIBRARY, PackedExperts, Router, Work, struct_of
from mini_engine.layers.blocks import Norm, check_rows, half_of, scale_of
from mini_engine.layers.packed_layers import PackedLinear
from mini_engine.layers.packed_step import alloc_padded, memory

Pack = Callable[[Tensor], PackedLinear]


class PackedRouter(nn.Module):
    """A router's weight in one matrix with that of the shared expert's gate, and what `router.h` must know.

    Args:
        mlp: gives up both weights. linear: packs a matrix.
    """

    def __init__(self, mlp: SparseFeedForward, linear: Pack) -> None:
        super().__init__()
        rules, gates = mlp.gate.rules, [gate for gate in (mlp.gate, mlp.shared_expert_gate) if gate is not None]
        self.logits = linear(torch.cat([gate.weight.data for gate in gates]))
        self.bias = None if rules.bias is None else rules.bias.data.float().contiguous()
        self.chosen = rules.top_k
        same = ("has_sigmoids", "normalizes", "rounds", "groups", "kept", "judges", "epsilon", "scale")
        self.struct = Router(matrix=self.logits.matrix, **{name: getattr(rules, name) for name in same})
        if self.bias is not None:
            self.struct.bias = self.bias.data_ptr()
        for gate in gates:
            del gate.weight


class PackedSparse(nn.Module):
    """A mixer's last matrix, then norm, router and experts; both results are added to x.

    Args:
        mlp: has all experts of the layer; gives up its weights. norm: in front of it. linear: packs a matrix.
        out: the mixer's last matrix.

    Raises:
        UserError: the library cannot be built here.
    """

    def __init__(self, mlp: SparseFeedForward, norm: Any, linear: Pack, out: PackedLinear) -> None:
        super().__init__()
        self.function = LIBRARY.function("finish", mlp.gate.weight.dtype)
        self.out, self.residual = out, half_of(out)
        self.scale = scale_of(norm)
        self.norm = Norm(self.scale.data_ptr(), norm.eps)
        self.router, self.experts = PackedRouter(mlp, linear), PackedExperts(mlp.experts, linear)
        self.shared = nn.ModuleList()
        if (shared := mlp.shared_expert) is not None:
            self.shared.extend(linear(x.weight.data) for x in (shared.gate_proj, shared.up_proj, shared.down_proj))
            del shared.gate_proj, shared.up_proj, shared.down_proj
        self.describe_layer()

    def describe_layer(self) -> None:
        """Tell C++ all but the addresses of a step's rows, and count the bytes that a row needs in each buffer."""
        experts, chosen, width = self.experts, self.router.chosen, self.experts.width
        sizes = dict(count=len(experts.structs), chosen=chosen, hidden=experts.hidden)
        work = Work(experts=experts.structs, adds=True, **sizes)
        if self.shared:
            matrices: Any = self.shared
            shared = struct_of(*matrices)
            work.shared, width = pointer(shared), max(width, shared.width)
        buffers = (
            (work.x, experts.hidden, 1),
            (work.sorted, experts.hidden, chosen),
            (work.active, width, chosen + 1),
            (work.results, experts.hidden, chosen + 1),
        )
        self.work, self.places = work, []
        for place, width, rows in buffers:
            row = alloc_padded(self.router.logits.weight.new_empty(1, 0), width)
            place.stride = row.stride(0)
            self.places.append((place, rows * place.stride * row.element_size()))
        self.row_bytes = sum(size for _, size in self.places)

    def forward(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Add the results for x `[T, hidden_size]`, in place. mixed: `[T, …]`, the mixer's.

        Raises:
            ValueError: the rows are not this layer's.
        """
        check_rows(x, self.router.logits)
        check_rows(mixed, self.out)
        work, count = self.work, len(x)
        work.rows, work.out.data, work.out.stride = count, x.data_ptr(), x.stride(0)
        buffer = torch.empty(count * self.row_bytes, dtype=torch.uint8)
        at = buffer.data_ptr()
        for place, size in self.places:
            place.data, at = at, at + count * size
        self.function(self.residual, memory(mixed), self.norm, self.router.struct, work, torch.get_num_threads())
        return x
