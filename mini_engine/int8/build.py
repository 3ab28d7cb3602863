"""Lesson 12. Makes the pool of an engine whose K and V are int8 rows."""

from mini_engine.engine.engine import PoolMaker
from mini_engine.int8.kernels import load_kernel
from mini_engine.int8.pool import Int8KvPool, bytes_per_token


class Int8PoolMaker(PoolMaker):
    """Makes an Int8KvPool; `Engine.for_model(model, pool=Int8PoolMaker)` builds an engine with one."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a pool needs for one token, scales included."""
        return bytes_per_token(self.model.config)

    def make(self, num_blocks: int, block_size: int, kernel: str) -> Int8KvPool:
        """As in lesson 5. Kernels have lesson 3's names."""
        model = self.model
        attend = load_kernel(kernel, model.device, model.dtype)
        return Int8KvPool(model.config, num_blocks, block_size, attend, model.device)
