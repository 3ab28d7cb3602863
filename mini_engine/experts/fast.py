"""Course machinery. Experts with lesson 9's linear layers: each expert's matrices are packed as a dense model's are."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.experts.experts import Experts, in_turn, weighted_sum
from mini_engine.experts.feed_forward import SparseFeedForward
from mini_engine.experts.packed import PackedExperts
from mini_engine.experts.sparse import Pack, PackedSparse
from mini_engine.layers import native
from mini_engine.layers.block_layer import dense_finish
from mini_engine.layers.packed_layers import PackedLinear
from mini_engine.layers.torch_layers import Join, TorchDecoderLayer, TorchFeedForward, TorchLinear

Make = Callable[..., Any]  # the fast form of a layer's experts, whose weights it takes over


class TorchExperts(nn.Module):
    """Experts whose matrices are torch's layers.

    Args:
        experts: gives up its weights.
    """

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.first = experts.first
        self.gate_up = nn.ModuleList(map(TorchLinear, experts.gate_up_proj.data))
        self.down = nn.ModuleList(map(TorchLinear, experts.down_proj.data))
        del experts.gate_up_proj, experts.down_proj

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Compute as `Experts` does."""
        return weighted_sum(x, experts - self.first, weights, len(self.down), partial(in_turn, self.run))

    def run(self, expert: int, rows: Tensor) -> Tensor:
        """Return the result of one of these experts, counted from the first, for some rows."""
        gate, up = self.gate_up[expert](rows).chunk(2, dim=-1)
        return self.down[expert](F.silu(gate) * up)


def fast_feed_forward(mlp: Any, matrix: Join, experts: Make) -> nn.Module:
    """Return the fast form of a feed-forward block, with experts or without; it takes over the weights.

    Args:
        matrix: makes one layer of several that share an input. experts: makes the fast form of experts.
    """
    if not isinstance(mlp, SparseFeedForward):
        return TorchFeedForward(mlp, matrix)
    shared = None if mlp.shared_expert is None else TorchFeedForward(mlp.shared_expert, matrix)
    return SparseFeedForward(mlp.gate, experts(mlp.experts), shared, mlp.shared_expert_gate)


class SparseDecoderLayer(TorchDecoderLayer):
    """Lesson 9's decoder layer with experts, in this layer or in others of the model.

    Takes all rows of a step at once: for each piece of them, all experts would be read again.
    """

    def __init__(self, *parts: Any, experts: Make) -> None:
        super().__init__(*parts, feed_forward=partial(fast_feed_forward, experts=experts))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: Any, meta: Any, rows: Tensor | None = None) -> Tensor:
        """See `TorchDecoderLayer.forward`."""
        return self.finish(*self.mixed(x, cos, sin, kv, meta, rows))


def sparse_finish(layer: Any, mixer: Any, norm: nn.Module, matrix: Join, linear: Pack) -> nn.Module:
    """Return what follows the mixer of a loaded layer, with experts or without.

    Args:
        mixer, norm, matrix: as for `dense_finish`. linear: packs a matrix.
    """
    if isinstance(layer.mlp, SparseFeedForward):
        return PackedSparse(layer.mlp, norm, linear, mixer.out)
    return dense_finish(layer, mixer, norm, matrix)


def experts_maker(functions: native.Functions | None) -> Make:
    """Return what makes the fast form of experts: packed if there are functions for it, otherwise torch's."""
    return TorchExperts if functions is None else partial(PackedExperts, linear=partial(PackedLinear, functions))


def sparse_layers(functions: native.Functions | None) -> tuple[Callable[..., Any], Callable[..., nn.Module]]:
    """Return what `with_torch_layers` takes for a model with experts: `layer` and `finish`."""
    packed: Any = functions  # without functions, nothing is finished by a packed layer
    layer = partial(SparseDecoderLayer, experts=experts_maker(functions))
    return layer, partial(sparse_finish, linear=partial(PackedLinear, packed))
