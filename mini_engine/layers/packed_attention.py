"""Course machinery. Attention in one call of `blocks.cpp`, but for its last matrix, where C++ can write the store."""

from typing import Any

import torch
from torch import Tensor

from mini_engine.layers.blocks import LIBRARY, Heads, Mixer, PackedEntry, check_rows
from mini_engine.layers.direct_step import DirectStep, Sizes
from mini_engine.layers.packed_layers import PackedLinear


class PackedAttention(PackedEntry):
    """The entry of an attention layer, and all that follows it up to the last matrix.

    Args:
        norm: of x. linear: yields q, k, v and gates. layer: among those with K and V.
        heads: numbers of query and of key heads. dim: of a head.
        gates: of each query head: 0, 1, or one for each dimension.
        head_norm, head_eps: as for PackedEntry.
    """

    def __init__(
        self,
        norm: Any,
        linear: PackedLinear,
        layer: int,
        heads: tuple[int, int],
        dim: int,
        gates: int,
        head_norm: Tensor | None,
        head_eps: float,
    ) -> None:
        super().__init__(norm, linear, sum(heads), dim, head_norm, head_eps)
        self.sizes = Sizes(linear.packed.in_features, linear.packed.out_features, *heads, dim)
        self.mixer = Mixer(heads=Heads(*heads, dim), gates=gates, layer=layer)
        self.mix = LIBRARY.function("mix", linear.weight.dtype)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, step: DirectStep) -> Tensor:
        """Write K and V of x `[T, hidden_size]`; return attention `[T, H_q * D]`, which the next layer overwrites.

        Args:
            cos, sin: as for `forward`.

        Raises:
            ValueError: x, the angles, the store or its plan do not fit this layer. Nothing is written.
        """
        check_rows(x, self.linear)
        shared = step.shared(x, self.sizes)
        if len(cos) != len(x) or self.mixer.layer >= len(shared.caches):
            raise ValueError(
                f"{len(cos)} positions for {len(x)} tokens, layer {self.mixer.layer} of {len(shared.caches)} in the "
                "store; each token has a position, and each layer a cache"
            )
        normed, out, attended = shared.places
        self.turn_by(cos, sin)
        self.describe(x, normed, out)
        self.mix(self.struct, self.mixer, shared.pool, attended, torch.get_num_threads())
        return shared.rows[2]
