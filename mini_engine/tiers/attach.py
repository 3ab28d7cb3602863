"""Lesson 12. Puts tiers behind the pool of an engine that was built without them."""

import atexit
import logging
from array import array
from dataclasses import dataclass
from pathlib import Path

from mini_engine.engine.engine import Engine
from mini_engine.engine.request import Request
from mini_engine.engine.runner import ModelRunner
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Chunk
from mini_engine.errors import UserError
from mini_engine.tiers.blocks import BlockBytes
from mini_engine.tiers.break_even import BreakEven, measured_bandwidth, measured_rate
from mini_engine.tiers.keys import Identity
from mini_engine.tiers.manager import TieredCacheManager
from mini_engine.tiers.store import Always, BlockStore, Judge
from mini_engine.tiers.tiers import Tiers

HOST_BYTES = 2**28
DISK_BYTES = 2**32
PROBE_TOKENS = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TierConfig:
    """What stands behind the pool.

    directory: of the disk tier; None for none. host_bytes, disk_bytes: the tiers' sizes.
    measure: decide by a measurement at the start whether bringing back from the disk pays; otherwise it always does.

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

    What waits to be written is written when the process ends.

    Raises:
        UserError: the directory cannot be created, or the host tier is smaller than one block.
    """
    pool, old = engine.runner.pool, engine.scheduler.manager
    blocks = BlockBytes([tensor for both in zip(pool.K, pool.V, strict=True) for tensor in both])
    if config.host_bytes < 2 * blocks.payload_bytes:
        raise UserError(
            f"kv_host_bytes is {config.host_bytes}, and a block of {old.block_size} tokens takes "
            f"{blocks.payload_bytes}; give room for at least two",
            param="kv_host_bytes",
        )
    tiers = Tiers.of_size(config.directory, config.host_bytes, config.disk_bytes)
    judge = measured(engine.runner, config.directory, blocks) if config.measure and config.directory else Always()
    store = BlockStore(tiers, blocks, identity, judge)
    engine.scheduler.manager = TieredCacheManager(pool.num_blocks, old.block_size, pool.copy_blocks, store)
    atexit.register(tiers.close)
    return store


def measured(runner: ModelRunner, directory: Path, blocks: BlockBytes) -> Judge:
    """Measure prefill and disk, and return their break-even. A directory that cannot be written cannot be measured."""
    try:
        bandwidth, latency = measured_bandwidth(directory, max(blocks.payload_bytes, 2**20))
    except OSError:
        return Always()
    rate = measured_rate(lambda num_tokens: prefill(runner, num_tokens), PROBE_TOKENS)
    judge = BreakEven(rate, blocks.payload_bytes // runner.block_size, bandwidth, latency)
    log.info("bringing KV back from %s pays from %s tokens on", directory, judge.num_tokens)
    return judge


def prefill(runner: ModelRunner, num_tokens: int) -> None:
    """Compute `num_tokens` tokens in the pool's first blocks, which no request holds yet."""
    num_blocks = -(-num_tokens // runner.block_size)
    num_tokens = min(num_tokens, (runner.pool.num_blocks - 1) * runner.block_size)
    request = Request("probe", [0] * num_tokens, SamplingParams(max_tokens=1))
    runner.run([Chunk(request, 0, num_tokens, array("i", range(1, num_blocks + 1)))])
