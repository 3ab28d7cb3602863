"""Lesson 16. Makes the pool of an engine for latents. Only its shapes and its kernel differ."""

from mini_engine.attention.registry import load_kernel
from mini_engine.kv.block_tensor import KvPool
from mini_engine.kv.pool_maker import PoolMaker


class LatentPoolMaker(PoolMaker):
    """Makes lesson 3's pool with a kernel for latents."""

    def make(self, num_blocks: int, block_size: int, kernel: str) -> KvPool:
        """Return a pool of this size, read by the kernel with this name; UserError if that is impossible."""
        attend = load_kernel(kernel, self.device, self.dtype, latents=True)
        return KvPool(self.config, num_blocks, block_size, attend, self.dtype, self.device)
