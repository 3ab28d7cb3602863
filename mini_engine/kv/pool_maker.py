"""Lesson 5. Makes an engine's pool: how many bytes a token takes decides how many blocks fit in a memory budget."""

from copy import copy
from typing import Any, Self

import torch

from mini_engine.attention.registry import load_kernel
from mini_engine.kv.block_tensor import KvPool, PoolShape
from mini_engine.kv.manager import CopyBlocks


class PoolMaker:
    """Makes the pool of an engine, in the model's dtype.

    Args:
        config: the shape of the pool. dtype, device: the model's.
        cache: further arguments of `load_kernel`, if the pool holds something else than K and V.
    """

    def __init__(self, config: PoolShape, dtype: torch.dtype, device: torch.device, **cache: Any) -> None:
        self.config, self.dtype, self.device, self.cache = config, dtype, device, cache

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a pool needs for one token."""
        return self.config.kv_bytes_per_token(self.dtype)

    def make(self, num_blocks: int, block_size: int, kernel: str) -> KvPool:
        """Return a pool of this size, read by the kernel with this name; UserError if that is impossible."""
        attend = load_kernel(kernel, self.device, self.dtype, **self.cache)
        return KvPool(self.config, num_blocks, block_size, attend, self.dtype, self.device)

    def on(self, device: torch.device) -> Self:
        """Return a maker of such pools on another device."""
        other = copy(self)
        other.device = device
        return other

    def copier(self, pool: KvPool) -> CopyBlocks:
        """Return the block copier of a pool that `make` has returned."""
        return pool.copy_blocks
