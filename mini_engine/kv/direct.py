"""Lesson 3. Direct stores: their layers' tensors may be written and read without calling the store.

`set_kv` and `attend` are two calls for each layer. Layers that run without a return to Python, or that write K and V
in a kernel of their own, ask for all tensors once in each step instead.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from mini_engine.attention.contract import EVERY_KEY, Kernel


class LayerCache(NamedTuple):
    """The tensors that one layer writes and reads in a step.

    k, v: `[num_blocks, block_size, H_kv, D]`.
    slots: `[T]` int64, where this step's K and V are written.
    block_table: `[S, max_blocks]` int32, the blocks that attention reads.
    window: how many keys a query sees, its own included.
    """

    k: Tensor
    v: Tensor
    slots: Tensor
    block_table: Tensor
    window: int = EVERY_KEY


class DirectStore(Protocol):
    """The tensors that a store offers, beside `set_kv` and `attend`, if `direct` is true.

    direct: K and V are stored as they are, so a layer may write them and run the kernel itself.
    kernel: reads the tensors in place.
    """

    direct: bool
    kernel: Kernel

    def layer_caches(self, meta: Any) -> Sequence[LayerCache]:
        """Return the cache of each layer of the model. All have one shape.

        Layers with the same slots and table hold the same tensors, so that these are checked once.
        """
        ...
