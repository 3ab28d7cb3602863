"""Lesson 12. Makes the pool of an engine whose K and V are int8 rows."""

from mini_engine.int8.kernels import load_kernel
from mini_engine.int8.pool import Int8KvPool, bytes_per_token
from mini_engine.kv.pool_maker import PoolMaker


class Int8PoolMaker(PoolMaker):
    """Makes an Int8KvPool; `Engine.for_model(model, pool=Int8PoolMaker)` builds an engine with one."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a pool needs for one token, scales included."""
        return bytes_per_token(self.config)

    def make(self, num_blocks: int, block_size: int, kernel: str) -> Int8KvPool:
        """Return a pool of int8 rows. Kernels have lesson 3's names; UserError if there is none of this name."""
        attend = load_kernel(kernel, self.device, self.dtype)
        return Int8KvPool(self.config, num_blocks, block_size, attend, self.device)
