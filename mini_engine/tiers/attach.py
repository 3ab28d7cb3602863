"""Lesson 12. Puts tiers behind the pool of an engine that was built without them."""

import logging
import weakref
from dataclasses import dataclass
from pathlib import Path

from mini_engine.engine.engine import Engine
from mini_engine.engine.request import Request
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Chunk
from mini_engine.errors import UserError
from mini_engine.hybrid.manager import HybridCacheManager
from mini_engine.hybrid.runner import HybridRunner
from mini_engine.hybrid.store import HybridKv
from mini_engine.tiers.blocks import BlockBytes
from mini_engine.tiers.break_even import BreakEven, Speed, measured_copy, measured_disk, measured_rate
from mini_engine.tiers.hybrid import TieredHybridManager
from mini_engine.tiers.keys import Identity
from mini_engine.tiers.manager import TieredCacheManager
from mini_engine.tiers.states import StateBytes
from mini_engine.tiers.store import Always, BlockStore, Judges
from mini_engine.tiers.tiers import Tiers

HOST_BYTES = 2**28
DISK_BYTES = 2**32
PROBE_TOKENS = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TierConfig:
    """What stands behind the pool.

    directory: of the disk tier; None for none. host_bytes, disk_bytes: the tiers' sizes.
    measure: decide by measurements at the start whether bringing KV back pays; otherwise it always does.

    Raises:
        UserError: a size is not a whole number of bytes, or there is no tier at all.
    """

    directory: Path | None = None
    host_bytes: int = HOST_BYTES
    disk_bytes: int = DISK_BYTES
    measure: bool = True

    def __post_init__(self) -> None:
        for name, size in (("kv_host_bytes", self.host_bytes), ("kv_disk_bytes", self.disk_bytes)):
            if type(size) is not int or size < 0:
                raise UserError(f"{name} is {size!r}; give a whole number of bytes, 0 or more", param=name)


def attach_tiers(engine: Engine, config: TierConfig, identity: Identity) -> BlockStore:
    """Replace the engine's manager by one with tiers. Call this before the first request.

    What waits to be written is written when the engine is gone or the process ends.

    Raises:
        UserError: the directory cannot be created, or the host tier is smaller than two blocks.
    """
    pool = engine.runner.pool
    blocks = BlockBytes.of_pool(pool.kv if isinstance(pool, HybridKv) else pool)
    if config.host_bytes < 2 * blocks.payload_bytes:
        raise UserError(
            f"kv_host_bytes is {config.host_bytes}, and a block of {engine.scheduler.manager.block_size} tokens takes "
            f"{blocks.payload_bytes}; give room for at least two",
            param="kv_host_bytes",
        )
    tiers = Tiers.of_size(config.directory, config.host_bytes, config.disk_bytes)
    judges = measured(engine, config.directory, blocks) if config.measure else Judges()
    store = BlockStore(tiers, blocks, identity, judges)
    if isinstance(pool, HybridKv):
        put_hybrid_manager(engine, pool, store)
    else:
        manager = engine.scheduler.manager
        engine.scheduler.manager = TieredCacheManager(
            pool.num_blocks, manager.block_size, pool.copy_blocks, block_store=store
        )
    weakref.finalize(engine, tiers.close)
    return store


def put_hybrid_manager(engine: Engine, pool: HybridKv, store: BlockStore) -> None:
    """Replace lesson 11's manager, which no request has used yet; its slots and its interval stay."""
    old, runner = engine.scheduler.manager, engine.runner
    assert isinstance(old, HybridCacheManager) and isinstance(runner, HybridRunner)  # `hybrid_engine` makes no other
    manager = TieredHybridManager(
        pool.kv.num_blocks,
        old.block_size,
        pool.kv.copy_blocks,
        states=pool.states,
        checkpoint_interval=old.interval,
        block_store=store,
        state_bytes=StateBytes(pool.states),
    )
    engine.scheduler.manager, runner.slot_of = manager, manager.slot_of


def measured(engine: Engine, directory: Path | None, blocks: BlockBytes) -> Judges:
    """Measure prefill, host memory and disk; return their break-evens. What cannot be written cannot be measured."""
    pool = engine.runner.pool
    state_bytes = StateBytes(pool.states).payload_bytes if isinstance(pool, HybridKv) else 0
    rate = measured_rate(lambda num_tokens: prefill(engine, num_tokens), PROBE_TOKENS)
    per_token = blocks.payload_bytes // engine.scheduler.manager.block_size

    def judge(name: str, speed: Speed) -> BreakEven:
        found = BreakEven(rate, per_token, speed.bandwidth, speed.latency + state_bytes / speed.bandwidth)
        log.info("bringing KV back from %s pays from %s tokens on", name, found.num_tokens)
        return found

    host = judge("host memory", measured_copy(blocks))
    try:
        return Judges(host, judge("the disk", measured_disk(directory, blocks.payload_bytes)) if directory else host)
    except OSError:
        return Judges(host, Always())


def prefill(engine: Engine, num_tokens: int) -> None:
    """Compute `num_tokens` tokens, as many as fit, in the pool of an engine that has no requests yet."""
    manager = engine.scheduler.manager
    num_tokens = min(num_tokens, manager.num_usable_blocks * manager.block_size)
    request = Request("probe", [0] * num_tokens, SamplingParams(max_tokens=1))
    manager.allocate(request.id, request.token_ids)
    try:
        engine.runner.run([Chunk(request, 0, num_tokens, manager.grow(request.id, num_tokens))])
    finally:
        manager.free(request.id)
