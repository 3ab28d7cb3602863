"""Lesson 5. Makes an engine's pool: how many bytes a token takes decides how many blocks fit in a memory budget."""

import torch

from mini_engine.attention.registry import load_kernel
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.kv.block_tensor import KvPool
from mini_engine.kv.manager import CopyBlocks


class PoolMaker:
    """Makes the pool of an engine, in the model's dtype. Lesson 12 has another one.

    Args:
        config: the shape of the layers with K and V. dtype, device: the model's.
    """

    def __init__(self, config: Qwen3Config, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a pool needs for one token."""
        return self.config.kv_bytes_per_token(self.dtype)

    def make(self, num_blocks: int, block_size: int, kernel: str) -> KvPool:
        """Return a pool of this size, read by the kernel with this name; UserError if that is impossible."""
        attend = load_kernel(kernel, self.device, self.dtype)
        return KvPool(self.config, num_blocks, block_size, attend, self.dtype, self.device)

    def copier(self, pool: KvPool) -> CopyBlocks:
        """Return what copies blocks of a pool that `make` has returned."""
        return pool.copy_blocks
