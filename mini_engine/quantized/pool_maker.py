"""Lesson 17. Makes the pool of an engine whose K and V, or latents, are rows."""

import torch

from mini_engine.kv.block_tensor import PoolShape
from mini_engine.kv.pool_maker import PoolMaker
from mini_engine.quantized import kernels, latents
from mini_engine.quantized.formats import RowFormat
from mini_engine.quantized.pool import RowKvPool, bytes_per_token


class RowPoolMaker(PoolMaker):
    """Makes a RowKvPool; `Engine.for_model(model, pool=partial(RowPoolMaker, rows=INT8))` builds an engine with one.

    Args:
        config, dtype, device: as in lesson 5. rows: the format. has_latents: K are latents, V rotary keys (lesson 16).
    """

    def __init__(
        self,
        config: PoolShape,
        dtype: torch.dtype,
        device: torch.device,
        rows: RowFormat,
        has_latents: bool = False,
    ) -> None:
        super().__init__(config, dtype, device)
        self.rows, self.has_latents = rows, has_latents

    @property
    def bytes_per_token(self) -> int:
        """The bytes that a pool needs for one token, scales included."""
        return bytes_per_token(self.config, self.rows)

    def make(self, num_blocks: int, block_size: int, kernel: str) -> RowKvPool:
        """Return a pool of rows. Kernels have the names of lessons 3 and 16; UserError if there is no such kernel."""
        load = latents.load_kernel if self.has_latents else kernels.load_kernel
        attend = load(kernel, self.device, self.dtype, self.rows)
        return RowKvPool(self.rows, self.config, num_blocks, block_size, attend, self.device)
