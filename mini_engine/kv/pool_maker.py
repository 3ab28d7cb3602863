"""Lesson 5. Makes an engine's pool: how many bytes a token takes decides how many blocks fit in a memory budget."""

from copy import copy
from typing import Self

import torch

from mini_engine.attention.registry import load_kernel
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.errors import UserError
from mini_engine.kv.block_tensor import KvPool
from mini_engine.kv.manager import CopyBlocks


class PoolMaker:
    """Makes the pool of an engine, in the model's dtype.

    Args:
        config: the shape of the layers with K and V. dtype, device: the model's.

    Raises:
        UserError: some layers have windows, which this pool alone would ignore.
    """

    def __init__(self, config: Qwen3Config, dtype: torch.dtype, device: torch.device) -> None:
        if config.has_windows:
            raise UserError(
                "layers with windows need a table for each group; use LLM or build_engine, as lesson 15 does"
            )
        self.config, self.dtype, self.device = config, dtype, device

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a pool needs for one token."""
        return self.config.kv_bytes_per_token(self.dtype)

    def make(self, num_blocks: int, block_size: int, kernel: str) -> KvPool:
        """Return a pool of this size, read by the kernel with this name; UserError if that is impossible."""
        if self.config.has_latents:
            raise UserError("latents need a store of their own; use LLM or build_engine, as lesson 16 does")
        attend = load_kernel(kernel, self.device, self.dtype)
        return KvPool(self.config, num_blocks, block_size, attend, self.dtype, self.device)

    def on(self, device: torch.device) -> Self:
        """Return a maker of such pools on another device."""
        other = copy(self)
        other.device = device
        return other

    def copier(self, pool: KvPool) -> CopyBlocks:
        """Return the block copier of a pool that `make` has returned."""
        return pool.copy_blocks
