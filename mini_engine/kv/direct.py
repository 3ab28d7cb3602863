"""Lesson 3. Direct stores: their layers' tensors may be written and read without calling the store.

`set_kv` and `attend` are two calls for each layer. Layers that run without a return to Python, or that write K and V
in a kernel of their own, ask for all tensors once in each step instead: a store whose `direct` is true has the method
`layer_caches(meta)`, which returns the LayerCache of each layer of the model. All have one shape, and layers with the
same slots and table hold the same tensors, so that these are checked once.
"""

from typing import NamedTuple

from torch import Tensor

from mini_engine.attention.contract import EVERY_KEY


class LayerCache(NamedTuple):
    """The tensors that one layer writes and reads in a step.

    k, v: `[num_blocks, block_size, H_kv, D]`; with another last dimension or dtype, only the kernel's own functions
        can write and read them.
    slots: `[T]` int64, where this step's K and V are written.
    block_table: `[S, max_blocks]` int32, the blocks that attention reads.
    window: how many keys a query sees, its own included.
    """

    k: Tensor
    v: Tensor
    slots: Tensor
    block_table: Tensor
    window: int = EVERY_KEY
