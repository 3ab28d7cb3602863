"""Lesson 18. The pools of all ranks: rank 0 creates and copies its own, and sends the others the same orders.

Paging, batches, chunks, preemption and prefix sharing decide which tokens are fed and which slots K and V go to. These
numbers are the same in every rank; each slot just holds fewer heads. Latents (lesson 16) have no heads, so each rank
has all of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

from mini_engine.assembly.pools import Pools
from mini_engine.distributed.tensor_parallel.messages import (
    Call,
    PoolSize,
    ReadBlocks,
    StatesSize,
    StoreOver,
    WriteBlocks,
)
from mini_engine.distributed.tensor_parallel.payloads import (
    Run,
    as_payloads,
    as_rows,
    block_layout,
    has_heads,
    join,
    split,
    state_layout,
)
from mini_engine.distributed.tensor_parallel.processes import Ranks
from mini_engine.hybrid.gdn_pool import GdnPool
from mini_engine.hybrid.track_slots import TrackSlots
from mini_engine.kv.block_tensor import KvPool
from mini_engine.kv.manager import CopyBlocks
from mini_engine.kv.pool_maker import PoolMaker
from mini_engine.tiers.blocks import BlockBytes
from mini_engine.tiers.records import Bytes


class SharedPools(Pools):
    """The pools of all ranks, each for its share of the heads."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = self.group = ranks

    def maker(self, own: PoolMaker) -> "SharedPoolMaker":
        """Return the pool maker of all ranks; `own` makes rank 0's pool."""
        return SharedPoolMaker(self.ranks, own)

    def slots(self, states: GdnPool) -> "SharedSlots":
        """Return the slots of all ranks; `states` is rank 0's pool, and the others create theirs."""
        return SharedSlots(self.ranks, states)

    def store(self, make: Callable[..., Any], model: Any, **pools: Any) -> Any:
        """Return rank 0's store; the others create theirs."""
        self.ranks.tell(StoreOver(make))
        return make(model, **pools)

    def block_bytes(self, kv: KvPool) -> "SharedBlockBytes | CopiedBlockBytes":
        """Return the blocks of all ranks as bytes."""
        if not has_heads(self.ranks.model.config):
            return CopiedBlockBytes(self.ranks, kv)
        own = BlockBytes(*kv.parts)
        return SharedBlockBytes(self.ranks, "kv", own, block_layout(own.tensors))

    def state_bytes(self, states: GdnPool) -> "SharedBlockBytes":
        """Return the state slots of all ranks as bytes."""
        layout = state_layout(states)
        return SharedBlockBytes(self.ranks, "states", BlockBytes(*states.parts), layout)


class SharedPoolMaker(PoolMaker):
    """Makes the KV pools of all ranks.

    Args:
        own: makes rank 0's pool; the others get a copy of the maker.
    """

    def __init__(self, ranks: Ranks, own: PoolMaker) -> None:
        super().__init__(own.config, own.dtype, own.device)
        self.ranks, self.own = ranks, own

    @property
    def bytes_per_token(self) -> int:
        """The bytes that each rank's pool needs for one token."""
        return self.own.bytes_per_token

    def make(self, num_blocks: int, block_size: int, kernel: str) -> KvPool:
        """Return rank 0's pool; the others create theirs."""
        pool = self.own.make(num_blocks, block_size, kernel)
        self.ranks.tell(PoolSize(self.own, num_blocks, block_size, kernel))
        return pool

    def copier(self, pool: KvPool) -> CopyBlocks:
        """Return the block copier of all ranks, like lesson 3's for one."""

        def copy_blocks(sources: Sequence[int], targets: Sequence[int]) -> None:
            pool.copy_blocks(sources, targets)
            self.ranks.tell(Call("kv", "copy_blocks", (list(sources), list(targets))))

        return copy_blocks


class SharedSlots(TrackSlots):
    """The slots of the state pools of all ranks. Copies and resets happen in each of them.

    Args:
        pool: rank 0's; the others create theirs.
    """

    def __init__(self, ranks: Ranks, pool: GdnPool) -> None:
        super().__init__(pool.max_reqs, pool.max_track_slots)
        self.ranks, self.pool = ranks, pool
        ranks.tell(StatesSize(pool.max_reqs, pool.max_track_slots))

    def reset_states(self, slots: Sequence[int]) -> None:
        """Zero the states of these slots."""
        self.pool.reset_states(slots)
        self.ranks.tell(Call("states", "reset_states", (list(slots),)))

    def copy_states(self, src_index: int, dst_index: int) -> None:
        """Copy the states of one slot to another."""
        self.pool.copy_states(src_index, dst_index)
        self.ranks.tell(Call("states", "copy_states", (src_index, dst_index)))


class SharedBlockBytes:
    """Whole blocks of all ranks as bytes, in the layout of one process.

    Args:
        pool: its name in a rank's memory. own: copies rank 0's. layout: of a rank's payload.
    """

    def __init__(self, ranks: Ranks, pool: str, own: BlockBytes, layout: Sequence[Run]) -> None:
        self.ranks, self.pool, self.own, self.layout = ranks, pool, own, layout

    @property
    def payload_bytes(self) -> int:
        """Size in bytes of one block in all layers and ranks."""
        return self.ranks.num_ranks * self.own.payload_bytes

    def read(self, blocks: Sequence[int]) -> Sequence[Bytes]:
        """Return a copy of each block's bytes."""
        mine = as_rows(self.own.read(blocks))
        theirs = self.ranks.ask(ReadBlocks(self.pool, list(blocks)), mine.nbytes)
        return as_payloads(join([mine, *(as_rows([one]).view_as(mine) for one in theirs)], self.layout))

    def write(self, blocks: Sequence[int], payloads: Sequence[Bytes]) -> None:
        """Copy payloads into blocks. Raises ValueError if there is not one of the right size for each block."""
        if [len(payload) for payload in payloads] != [self.payload_bytes] * len(blocks):
            raise ValueError(f"{len(blocks)} blocks need as many payloads of {self.payload_bytes} bytes each")
        mine, *theirs = map(as_payloads, split(as_rows(payloads), self.layout, self.ranks.num_ranks))
        self.own.write(blocks, mine)
        self.ranks.tell_each([WriteBlocks(self.pool, list(blocks), list(map(bytes, part))) for part in theirs])


class CopiedBlockBytes(BlockBytes):
    """Whole blocks as bytes if every rank has all of each block: reads are rank 0's, writes go to all ranks."""

    def __init__(self, ranks: Ranks, kv: KvPool) -> None:
        super().__init__(*kv.parts)
        self.ranks = ranks

    def write(self, blocks: Sequence[int], payloads: Sequence[Bytes]) -> None:
        """Copy payloads into blocks. Raises ValueError if there is not one of the right size for each block."""
        super().write(blocks, payloads)
        self.ranks.tell(WriteBlocks("kv", list(blocks), list(map(bytes, payloads))))
