"""Course machinery. The base class of stores around lesson 3's pool whose layers read more than their own K and V."""

from typing import Any

from torch import Tensor

from mini_engine.kv.store import Store


class StoreAround(Store):
    """A store around `kv`, a pool or another store; a subclass overrides what it does otherwise.

    Attributes:
        K, kernel, device: the pool's; `kernel` reads the pool without a window.
    """

    def __init__(self, kv: Any) -> None:
        self.kv, self.K, self.kernel, self.device = kv, kv.K, kv.kernel, kv.device

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block included."""
        return self.kv.num_blocks

    @property
    def bytes(self) -> int:
        """Size of the pool in bytes, used or not."""
        return self.kv.bytes

    def set_kv(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v, `[T, H_kv, D]` or a latent and a rotary key, into the slots `slot_mapping` `[T]` int64."""
        self.kv.set_kv(layer, slot_mapping, k, v)
