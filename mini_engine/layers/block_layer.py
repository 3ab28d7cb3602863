"""Course machinery. A decoder layer over packed matrices around any mixer: `blocks.cpp`'s calls in front and behind."""

from typing import Any

from torch import Tensor, nn

from mini_engine.layers.blocks import PackedFinish
from mini_engine.layers.torch_layers import Join


class BlockLayer(nn.Module):
    """A decoder layer that takes all rows of a step at once.

    Args:
        mixer: of the layer, in its fast form: it norms x and stops before its last matrix.
        finish: adds the results of that matrix and of the feed-forward block to x, in place.
    """

    def __init__(self, mixer: nn.Module, finish: nn.Module) -> None:
        super().__init__()
        self.mixer, self.finish = mixer, finish

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: Any, meta: Any, rows: Tensor | None = None) -> Tensor:
        """Have the store keep every row of x `[T, hidden_size]`; return the given `rows` of the result, or all."""
        mixed = self.mixer(x, cos, sin, kv, meta)
        return self.finish(x, mixed) if rows is None else self.finish(x[rows], mixed[rows])


def dense_finish(layer: Any, mixer: Any, norm: nn.Module, matrix: Join) -> nn.Module:
    """Return what follows the mixer of a loaded layer whose feed-forward block is dense.

    Args:
        norm: in front of that block. matrix: packs its matrices.
    """
    return PackedFinish(mixer.out, norm, layer.mlp, matrix)
