"""Lesson 16. Latents in lesson 10's device loop, whose pool can store K and V of different shapes."""

from typing import Any

from mini_engine.gpu.kv_pool import KvPool
from mini_engine.gpu.loop import DeviceKv, NoMemory
from mini_engine.gpu.req_to_token import ReqToTokenPool
from mini_engine.gpu.slot_allocator import TokenToKVPoolAllocator
from mini_engine.latents.latent_config import LatentConfig
from mini_engine.latents.store import LatentKv


class LatentRows(NoMemory):
    """Lesson 16's store over the loop's pool. A row of the table needs only its slots."""

    def __init__(self, config: LatentConfig) -> None:
        self.config = config

    def store(self, pool: KvPool) -> Any:
        """Return the pool as a store of latents."""
        return LatentKv(self.config, pool)


def latent_device_kv(
    config: LatentConfig, kv: KvPool, table: ReqToTokenPool, allocator: TokenToKVPoolAllocator
) -> DeviceKv:
    """Return the storage of `generate_on_device` for a model with latents; `kv` has a kernel for them."""
    return DeviceKv(table, allocator, kv, LatentRows(config))
