"""Lesson 17. Makes the pool of an engine whose K and V, or latents, are rows."""

from typing import Any

import torch

from mini_engine.attention.registry import load_kernel
from mini_engine.kv.block_tensor import PoolShape
from mini_engine.kv.pool_maker import PoolMaker
from mini_engine.quantized.formats import RowFormat
from mini_engine.quantized.pool import RowKvPool, bytes_per_token


class RowPoolMaker(PoolMaker):
    """Makes a RowKvPool.

    Args:
        config, dtype, device, cache: as in lesson 5. rows: the format.
    """

    def __init__(
        self, config: PoolShape, dtype: torch.dtype, device: torch.device, rows: RowFormat, **cache: Any
    ) -> None:
        super().__init__(config, dtype, device, **cache)
        self.rows = rows

    @property
    def bytes_per_token(self) -> int:
        """The bytes that a pool needs for one token, scales included."""
        return bytes_per_token(self.config, self.rows)

    def make(self, num_blocks: int, block_size: int, kernel: str) -> RowKvPool:
        """Return a pool of rows. Kernels have the names of lessons 3 and 16; UserError if there is no such kernel."""
        attend = load_kernel(kernel, self.device, self.dtype, self.rows.name, **self.cache)
        return RowKvPool(self.rows, self.config, num_blocks, block_size, attend, self.device)
