"""Lesson 11. Mixers with a state in one call of `hybrid_layers.cpp`, but for their last matrix.

What a step's layers share is checked and described once (`StateStep`), and a layer's weights when the model is made.
"""

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mini_engine.hybrid.gdn_pool import GdnPool
from mini_engine.hybrid.native import LIBRARY, ConvSizes, Feeds, Gates, StepSizes, by_tap
from mini_engine.layers.blocks import EntryRows, PackedEntry, check_rows
from mini_engine.layers.native import Place
from mini_engine.layers.packed_step import alloc_padded, memory, once


class StateStep:
    """A step over a pool of states on the CPU: its feeds, and where each layer's states are."""

    def __init__(self, states: GdnPool, feeds: Feeds) -> None:
        pools = states.recurrent_state, states.conv_state
        self.feeds, self.num_layers = feeds, len(pools[0])
        self.shapes = (pools[1].dtype, *(x.shape[2:] for x in pools))
        self.layers = [(x.data_ptr(), x.stride(0) * x.element_size()) for x in pools]

    def addresses(self, layer: int, shapes: tuple) -> list[int]:
        """Return where a layer's states begin: recurrent and conv, for C++.

        Args:
            shapes: of the layer: the dtype of conv states, and the shapes of one recurrent and one conv state.

        Raises:
            ValueError: the pool has no such layer, or others.
        """
        if layer >= self.num_layers or shapes != self.shapes:
            raise ValueError(
                f"the pool has {self.num_layers} layers with states {list(map(str, self.shapes))}; this is layer "
                f"{layer} with {list(map(str, shapes))}"
            )
        return [begin + layer * size for begin, size in self.layers]


class Shared(NamedTuple):
    """What layers of the same sizes share in a step. result: owned by `rows`, the last of them."""

    at: EntryRows
    result: Place
    rows: list[Tensor]


class StateMixer:
    """A mixer with a state; a subclass makes the call.

    Args:
        project: its norm and first matrix. index: among the layers with a state. width: of its result.
        shapes: as for `StateStep.addresses`.
    """

    def __init__(self, project: PackedEntry, index: int, width: int, *shapes: tuple[int, ...]) -> None:
        self.project, self.index = project, index
        sizes = project.linear.packed
        self.widths, dtype = (sizes.in_features, sizes.out_features, width), sizes.tiles.dtype
        self.shapes, self.key = (dtype, *map(torch.Size, shapes)), ("states", self.widths)

    def run(self, x: Tensor, step: StateStep) -> Tensor:
        """Advance the states by x `[T, hidden_size]`; return results `[T, width]`, which the next layer overwrites.

        Raises:
            ValueError: x, the states or the step's feeds do not fit this layer. Nothing is written.
        """
        shared = once(x, self.key, self.share)
        if step.feeds.num_rows != shared.at.rows:
            raise ValueError(f"x has {shared.at.rows} rows; this step has {step.feeds.num_rows}")
        states = step.addresses(self.index, self.shapes)
        self.project.struct.at = shared.at
        self.call(step.feeds, states, shared.result)
        return shared.rows[-1]

    def share(self, x: Tensor) -> Shared:
        """Check x, and make room for the activations."""
        check_rows(x, self.project.linear)
        rows = [alloc_padded(x, width) for width in self.widths]
        normed, out, result = map(memory, rows)
        return Shared(EntryRows(len(x), memory(x), normed, out), result, rows)

    def call(self, feeds: Feeds, states: list[int], result: Place) -> None:
        """Call C++. states: the addresses of the layer's recurrent and conv states."""
        raise NotImplementedError


class FastStateMixer(nn.Module):
    """A mixer with a state without its last matrix, which a subclass puts in `out`; one call, where that can be.

    A subclass also sets `project`, the norm and the first matrix, and says how both ways go.
    """

    project: nn.Module

    def forward(self, x: Tensor, cos: Any, sin: Any, kv: Any, meta: Any) -> Tensor:
        """Advance the states by x `[T, hidden_size]`; return results `[T, width]`, which the next layer overwrites."""
        if self.packed is not None and kv.state_step is not None:
            return self.packed.run(x, kv.state_step)
        return self.by_store(self.project(x), kv, meta)

    @cached_property
    def packed(self) -> StateMixer | None:
        """The call; None: the matrix is not packed."""
        return self.pack(self.project) if isinstance(self.project, PackedEntry) else None

    def by_store(self, x: Tensor, kv: Any, meta: Any) -> Tensor:
        """Return the results for what `project` yields; the store advances its states."""
        raise NotImplementedError

    def pack(self, project: PackedEntry) -> StateMixer:
        """Return the call that does the same."""
        raise NotImplementedError


class PackedShortConv(StateMixer):
    """A short convolution between its gates. weight: `[C, K]`. bias: `[C]`. Others as for StateMixer."""

    def __init__(self, project: PackedEntry, index: int, weight: Tensor, bias: Tensor | None) -> None:
        channels, taps = weight.shape
        super().__init__(project, index, channels, (0, 0, 0), (channels, taps - 1))
        self.weight, self.bias = by_tap(weight), None if bias is None else bias.float()
        self.function = LIBRARY.function("short_conv", weight.dtype)
        pointers = [None if x is None else x.data_ptr() for x in (self.weight, self.bias)]
        self.struct = ConvSizes(channels, taps, *pointers)

    def call(self, feeds: Feeds, states: list[int], result: Place) -> None:
        """See `StateMixer.call`."""
        rows, state = feeds.structs, states[1]
        threads = torch.get_num_threads()
        self.function(self.project.struct, self.struct, rows, len(rows), state, result, threads)


class PackedDeltaNet(StateMixer):
    """A delta net with its gates.

    Args:
        net: the module that owns the weights: `rate`, `dt_bias`, `gated_norm` and `conv_weight`.
    """

    def __init__(self, project: PackedEntry, index: int, sizes: StepSizes, net: Any) -> None:
        value, channels = (sizes.value_heads, sizes.key_dim, sizes.value_dim), len(net.conv_weight)
        super().__init__(project, index, value[0] * value[2], value, (channels, sizes.taps - 1))
        self.sizes, self.weight = sizes, by_tap(net.conv_weight)
        self.parts = dict(rate=net.rate, dt_bias=net.dt_bias, norm=net.gated_norm.weight.data.float())
        pointers = {name: tensor.data_ptr() for name, tensor in self.parts.items()}
        self.gates = Gates(eps=net.gated_norm.eps, **pointers)
        self.function = LIBRARY.function("delta_net", net.conv_weight.dtype)

    def call(self, feeds: Feeds, states: list[int], result: Place) -> None:
        """See `StateMixer.call`."""
        rows, (recurrent, conv) = feeds.structs, states
        call = self.project.struct, self.sizes, rows, len(rows), self.weight.data_ptr(), conv, recurrent
        self.function(*call, self.gates, result, torch.get_num_threads())
