"""Lesson 10. K and V by slot: a view of lesson 3's pool, whose block is the slot allocator's page.

Block 0 is padding, as in lesson 3. K and V may differ in heads and dimension: in multi-head latent attention
(DeepSeek-V2, 2024) they are a latent and a rotary key, which lesson 16's store reads.

The buffers' names are those of SGLang (Zheng et al., 2024) and pymllm.
"""

from math import prod

import torch
from torch import Tensor

from mini_engine.kv.block_tensor import KvPool


class SlotPool:
    """The slots of a pool: what is written to a slot here is what the model and its kernels read by block.

    Args:
        blocks: K and V of each layer, `[num_pages, page_size, heads, dim]`. The model reads and writes this pool.
    """

    def __init__(self, blocks: KvPool) -> None:
        self.blocks = blocks

    @property
    def page_size(self) -> int:
        """Slots per page."""
        return self.blocks.K[0].shape[1]

    @property
    def size(self) -> int:
        """The number of slots for tokens, page_size … page_size + size - 1: the padding page is not counted."""
        return (self.blocks.num_blocks - 1) * self.page_size

    @property
    def device(self) -> torch.device:
        """The device of K and V."""
        return self.blocks.device

    def get_key_buffer(self, layer_id: int) -> Tensor:
        """Return the layer's keys by slot, `[num_slots, heads, dim]`, padding included: a view, not a copy."""
        return self.blocks.K[layer_id].flatten(0, 1)

    def get_value_buffer(self, layer_id: int) -> Tensor:
        """Return the layer's values by slot, `[num_slots, heads, dim]`, padding included: a view, not a copy."""
        return self.blocks.V[layer_id].flatten(0, 1)

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Return both buffers of the layer."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def set_kv_buffer(self, layer_id: int, indices: Tensor, k: Tensor, v: Tensor) -> None:
        """Write a row of k and of v into each slot of `indices`, int32 or int64, of this layer.

        k is `[..., heads, dim]` or `[..., heads * dim]`, v likewise in its own shape; each has one row per slot.

        Raises:
            ValueError: the shapes do not fit each other or the pool, or a slot is out of bounds; nothing is written.
                Slots on a GPU are not checked, as in lesson 3: the host would have to wait for the answer.
        """
        slots, buffers = indices.flatten().long(), self.get_kv_buffer(layer_id)
        k_rows, v_rows = (
            rows_of(name, x, len(slots), buffer.shape[1:])
            for name, x, buffer in zip("kv", (k, v), buffers, strict=True)
        )
        self.blocks.set_kv(layer_id, slots, k_rows, v_rows)


def rows_of(name: str, x: Tensor, count: int, shape: torch.Size) -> Tensor:
    """Return x as `[count, heads, dim]`; ValueError if it does not fit."""
    ends_well = x.shape[-2:] == shape or x.shape[-1:] == (prod(shape),)
    if not ends_well or x.numel() != count * prod(shape):
        raise ValueError(f"{name} is {list(x.shape)}; for {count} slots it must be {[count, *shape]}, one row per slot")
    return x.reshape(count, *shape)
