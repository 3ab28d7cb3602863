"""Course machinery. Attention in one call of `blocks.cpp`, but for its last matrix, where C++ can write the store."""

from typing import Any

import torch
from torch import Tensor

from mini_engine.layers.blocks import LIBRARY, EntryRows, Heads, Mixer, PackedEntry, angles_of, check_rows
from mini_engine.layers.direct_step import DirectStep, Shared, Sizes
from mini_engine.layers.packed_layers import PackedLinear
from mini_engine.layers.packed_step import memory, once


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
        struct, layer = self.struct, self.mixer.layer
        shared, at = once(x, (step, self.sizes), lambda x: self.share(x, step))
        if len(cos) != at.rows or layer >= len(shared.caches):
            raise ValueError(
                f"{len(cos)} positions for {at.rows} tokens, layer {layer} of {len(shared.caches)} in the store; each "
                "token has a position, and each layer a cache"
            )
        angles, _ = once(cos, (struct.dim, id(sin)), lambda cos: (angles_of(cos, sin, struct.dim), sin))  # sin stays
        struct.at, struct.angles = at, angles
        self.mix(struct, self.mixer, shared.pool, shared.places[2], torch.get_num_threads())
        return shared.rows[2]

    def share(self, x: Tensor, step: DirectStep) -> tuple[Shared, EntryRows]:
        """Check x and the store; return what layers of these sizes share in the step, and x's rows for C++."""
        check_rows(x, self.linear)
        shared = step.shared(x, self.sizes)
        return shared, EntryRows(len(x), memory(x), *shared.places[:2])
