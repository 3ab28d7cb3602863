"""Lesson 11. Lesson 10's device loop for a hybrid: a request's row in the table is its slot in the state pool.

`generate_on_device` runs as it is. A row that is handed out begins with a state of zeros, and padding rows, which are
row 0, write their states into slot 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mini_engine.errors import UserError
from mini_engine.gpu.kv_pool import KvPool
from mini_engine.gpu.loop import DeviceKv
from mini_engine.gpu.req_to_token import ReqToTokenPool
from mini_engine.gpu.slot_allocator import TokenToKVPoolAllocator
from mini_engine.hybrid.config import HybridConfig
from mini_engine.hybrid.gdn_pool import GdnPool
from mini_engine.hybrid.runner import shallow, with_states
from mini_engine.hybrid.store import HybridKv, HybridMeta
from mini_engine.kv.block_tensor import ForwardMeta


class DeviceHybridKv(HybridKv):
    """Both pools behind lesson 10's table and allocator."""

    kv: KvPool

    @property
    def page_size(self) -> int:
        """Slots in a page of the KV pool."""
        return self.kv.page_size

    @property
    def size(self) -> int:
        """The number of slots for tokens."""
        return self.kv.size


@dataclass(frozen=True)
class HybridDeviceKv(DeviceKv):
    """Lesson 10's storage with a state for every row.

    Raises:
        UserError: the table has more rows than the pool has working slots.
    """

    pool: DeviceHybridKv

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.table.max_reqs > self.pool.states.max_reqs:
            raise UserError(
                f"the table has {self.table.max_reqs} rows and the state pool {self.pool.states.max_reqs} working "
                "slots; a row needs the slot with its number"
            )

    def take(self, length: int) -> int:
        """As in lesson 10; the row's state is zero, whatever the request before it left there."""
        row = super().take(length)
        self.pool.states.reset_states([row])
        return row

    def complete(self, meta: ForwardMeta, rows: Tensor, lengths: Sequence[int] | None) -> HybridMeta:
        """Add the rows as state slots. A decode step needs no length, so nothing waits for the device."""
        if lengths is None:
            return HybridMeta(**shallow(meta), single_rows=None, single_slots=rows)
        return with_states(meta, rows.tolist(), lengths)


def hybrid_device_kv(
    config: HybridConfig, kv: KvPool, states: GdnPool, table: ReqToTokenPool, allocator: TokenToKVPoolAllocator
) -> HybridDeviceKv:
    """Return the storage of `generate_on_device` for a hybrid."""
    return HybridDeviceKv(table, allocator, DeviceHybridKv(config, kv, states))
