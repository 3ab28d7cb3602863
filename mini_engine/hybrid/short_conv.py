"""Lesson 11. A short convolution as a mixer: its whole state is a token's last few inputs.

    kv.convolve(layer, x, weight, meta) -> out      # x, out [T, C]; weight [C, K]

The store convolves each sequence's x, every channel by itself, together with the last K - 1 inputs that it has kept of
the sequence, and keeps the new last ones. There is no activation. `layer` counts the layers that keep a state.
"""

from typing import Any, Protocol

from torch import Tensor, nn

from mini_engine.hybrid.model import ConvWeight
from mini_engine.model.layers import Linear


class ConvStore(Protocol):
    """The call that a short convolution makes to its store."""

    def convolve(self, layer: int, x: Tensor, weight: Tensor, meta: Any) -> Tensor: ...


class ShortConv(nn.Module):
    """A convolution between two gates, C · conv(B · x), as in LFM2 (Liquid AI, 2025, arXiv:2511.23404).

    Args:
        hidden: the size of the layer's input and output. channels: of the convolution: as many, or a rank's share.
        taps: K, the inputs that each output is computed from. index: of this layer among those with a state.
    """

    def __init__(self, hidden: int, channels: int, taps: int, bias: bool, index: int) -> None:
        super().__init__()
        self.index = index
        self.in_proj = Linear(hidden, 3 * channels, bias=bias)  # B, C and x
        self.filters = ConvWeight(channels, taps, bias)
        self.out_proj: nn.Module = Linear(channels, hidden, bias=bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: ConvStore, meta: Any) -> Tensor:
        """Return the output `[T, hidden_size]`; positions play no role in it."""
        before, after, x = self.in_proj(x).chunk(3, dim=-1)
        out = kv.convolve(self.index, before * x, self.filters.weight[:, 0], meta)
        if self.filters.bias is not None:
            out = out + self.filters.bias
        return self.out_proj(after * out)
