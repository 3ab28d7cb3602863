"""Lesson 10. The KV pool behind a slot allocator: page 0 is padding, and K and V may differ in shape.

In some models what is stored as K and as V differs in heads or dimensions: in multi-head latent attention (DeepSeek-V2,
2024) it is a latent and a rotary key, which lesson 16's store reads. The pool only stores, so it supports that. The
paged kernels of lesson 3 do not, so `attend` requires the two shapes to be equal.

The buffers' names are those of SGLang (Zheng et al., 2024) and pymllm. They are views by slot; a kernel reads the same
bytes by page.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.errors import UserError
from mini_engine.kv import block_tensor
from mini_engine.kv.block_tensor import ForwardMeta, allocate_layers


class HeadShape(NamedTuple):
    """Shape of one token's key or value in one layer: `[heads, dim]`."""

    heads: int
    dim: int


class KvPool(block_tensor.KvPool):
    """K and V of each layer, `[num_pages, page_size, heads, dim]`. Methods not overridden here are lesson 3's.

    Args:
        size: slots for tokens, page_size … page_size + size - 1; the padding page is not counted.
        k_shape: heads and dimension of a key; v_shape: of a value, None for the same.
        kernel: a paged-attention kernel, or None for a pool that only stores.
    """

    def __init__(
        self,
        size: int,
        num_layers: int,
        k_shape: tuple[int, int],
        v_shape: tuple[int, int] | None = None,
        *,
        page_size: int = 1,
        kernel: Callable[..., Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        if page_size < 1 or size < page_size or size % page_size:
            raise UserError(
                f"{size} slots cannot be divided into pages of {page_size}; "
                "use a page size of at least 1 and a multiple of it as the number of slots"
            )
        pages = (size // page_size + 1, page_size)
        self.k_shape, self.v_shape = HeadShape(*k_shape), HeadShape(*(v_shape or k_shape))
        self.K = allocate_layers(num_layers, (*pages, *self.k_shape), dtype, device)
        self.V = allocate_layers(num_layers, (*pages, *self.v_shape), dtype, device)
        self.page_size = page_size
        self.kernel = kernel

    @classmethod
    def for_model(cls, config: Qwen3Config, size: int, **options) -> "KvPool":
        """Return a pool with the layers of this model and what it stores; `options` are the constructor's."""
        return cls(size, config.num_hidden_layers, config.k_shape, config.v_shape, **options)

    @property
    def size(self) -> int:
        """The number of slots for tokens."""
        return (self.num_blocks - 1) * self.page_size

    def get_key_buffer(self, layer_id: int) -> Tensor:
        """Return the layer's keys by slot, `[num_slots, heads, dim]`, padding included: a view, not a copy."""
        return self.K[layer_id].flatten(0, 1)

    def get_value_buffer(self, layer_id: int) -> Tensor:
        """Return the layer's values by slot, `[num_slots, heads, dim]`, padding included: a view, not a copy."""
        return self.V[layer_id].flatten(0, 1)

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Return both buffers of the layer."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def set_kv_buffer(self, layer_id: int, indices: Tensor, k: Tensor, v: Tensor) -> None:
        """Write a row of k and of v into each slot of `indices`, int32 or int64, of this layer.

        k is `[..., heads, dim]` or `[..., heads * dim]`, v likewise in its own shape; each has one row per slot.

        Raises:
            ValueError: the shapes do not fit each other or the pool, or a slot is out of bounds; nothing is written.
                (On a GPU slots are not checked here, because the host would have to wait for the answer. There the
                write itself fails if a slot is out of bounds.)
        """
        slots = indices.flatten()
        k_rows = _rows_of("k", k, self.k_shape, len(slots))
        v_rows = _rows_of("v", v, self.v_shape, len(slots))
        keys, values = self.get_kv_buffer(layer_id)
        if slots.device.type == "cpu" and ((slots < 0) | (slots >= len(keys))).any():
            raise ValueError(f"slots {slots.tolist()} are not all in 0 … {len(keys) - 1}")
        slots = slots.long()
        keys.index_copy_(0, slots, k_rows)  # keys[slots] = k_rows would treat -1 as the last slot
        values.index_copy_(0, slots, v_rows)

    def set_kv(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Call `set_kv_buffer`: this is the name that the model's layers know since lesson 0."""
        self.set_kv_buffer(layer, slot_mapping, k, v)

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of K and V `[n, heads, dim]` in the given slots `[n]`, in that order."""
        keys, values = self.get_kv_buffer(layer)
        return keys[slots], values[slots]

    def attend(self, layer: int, q: Tensor, meta: ForwardMeta) -> Tensor:
        """Compute attention with the pool's kernel, as in lesson 3; `meta.block_table` holds page ids.

        Raises:
            ValueError: there is no kernel, or K and V differ in shape, which the kernels' contract does not allow.
        """
        if self.kernel is None:
            raise ValueError("this pool has no attention kernel; create it with one, or read K and V with gather")
        if self.k_shape != self.v_shape:
            raise ValueError(
                f"a key is {list(self.k_shape)} and a value {list(self.v_shape)}, and a paged kernel "
                "needs one shape for both; read them with gather"
            )
        return super().attend(layer, q, meta)


def _rows_of(name: str, x: Tensor, shape: HeadShape, count: int) -> Tensor:
    """Return x as `[count, heads, dim]`; ValueError if it does not fit."""
    ends_well = x.shape[-2:] == shape or x.shape[-1:] == (shape.heads * shape.dim,)
    if not ends_well or x.numel() != count * shape.heads * shape.dim:
        raise ValueError(f"{name} is {list(x.shape)}; for {count} slots it must be {[count, *shape]}, one row per slot")
    return x.reshape(count, *shape)
