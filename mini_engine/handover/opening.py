"""Lesson 19. Opens both ends of a hand-over: the engine in a worker's process, and the receiving engine's connector."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.assembly.pools import OWN_POOLS, Pools
from mini_engine.assembly.storage import Storage
from mini_engine.base.errors import UserError
from mini_engine.distributed.tensor_parallel.shared_block import SharedBlock
from mini_engine.engine.engine import Engine
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.handover.either import EitherConnector
from mini_engine.handover.extras import ExtraBuffers
from mini_engine.handover.prefill import Built
from mini_engine.handover.protocol import Layout
from mini_engine.handover.receiver import ReceivingConnector
from mini_engine.handover.sender import SendingConnector
from mini_engine.handover.stage import Stage
from mini_engine.handover.transfers import Transfers
from mini_engine.handover.workers import PrefillWorkers
from mini_engine.kv.cache_coordinator import cache_of
from mini_engine.tiers.keys import Identity

STAGE_BYTES = 2**28
MIN_TOKENS = 64


def start_workers(
    path: str | Path,
    config: EngineConfig,
    dtype: str | torch.dtype,
    device: str | torch.device,
    build: Callable[..., Built],
) -> PrefillWorkers:
    """Start the workers of an engine. They load their models while this process loads its own.

    Args:
        build: `build_worker`, which each worker calls in its process.
    """
    from mini_engine.distributed.routing.policy import PrefixScore

    block = SharedBlock(STAGE_BYTES if config.handover_bytes is None else config.handover_bytes)
    there = partial(build, str(path), worker_config(config), str(dtype).removeprefix("torch."), str(device))
    return PrefillWorkers(there, config.prefill_workers, block, PrefixScore(0.3), config.block_size)


def worker_config(config: EngineConfig) -> EngineConfig:
    """Return the config of a worker's engine: like the receiver's, but it only computes prompts, one after another."""
    limits = replace(config.scheduler_config or SchedulerConfig(), policy="fcfs")
    return replace(
        config,
        prefill_workers=0,
        handover_bytes=None,
        handover_min_tokens=None,
        enable_prefix_caching=True,
        kv_events=None,
        kv_events_replay=None,
        max_track_slots=config.max_track_slots or None,
        kv_cache_dir=None,
        kv_host_bytes=None,
        kv_disk_bytes=None,
        kv_cache_key_file=None,
        kv_always=False,
        tensor_parallel_size=1,
        speculate=None,
        scheduler_config=limits,
    )


def sending_connector(
    storage: Storage, config: EngineConfig, identity: Identity, block: SharedBlock, say: Callable[[Any], None]
) -> tuple[SendingConnector, Layout]:
    """Return the connector of a worker's engine over the stage in `block`, and its layout."""
    blocks, extras, stage, layout = one_end(storage, OWN_POOLS, identity, block)
    return SendingConnector(stage, blocks, config.block_size, extras, say), layout


def receiving_connector(
    workers: PrefillWorkers, storage: Storage, config: EngineConfig, identity: Identity, pools: Pools
) -> ReceivingConnector:
    """Shake hands with the workers and return the connector. Workers end with the connector or this process.

    Raises:
        UserError: a worker cannot start or its layout differs, or the stage is too small for one block.
    """
    blocks, extras, stage, layout = one_end(storage, pools, identity, workers.block)
    least = 1 + extras.num_buffers(0, 1)
    if stage.num_buffers < least:
        raise UserError(
            f"handover_bytes is {workers.block.size}, but a block of {config.block_size} tokens with its extras "
            f"takes {least * blocks.payload_bytes}; give at least that",
            param="handover_bytes",
        )
    transfers = Transfers(stage.num_buffers)
    workers.meet(layout, transfers)
    min_tokens = MIN_TOKENS if config.handover_min_tokens is None else config.handover_min_tokens
    connector = ReceivingConnector(workers, transfers, stage, blocks, config.block_size, extras, min_tokens)
    weakref.finalize(connector, workers.close)
    return connector


def workers_of(engine: Engine) -> PrefillWorkers:
    """Return the prefill workers of an engine, which must have some."""
    connector = cache_of(engine.scheduler.manager).connector
    if isinstance(connector, EitherConnector):
        connector = connector.workers
    assert isinstance(connector, ReceivingConnector) and isinstance(connector.senders, PrefillWorkers)
    return connector.senders


def one_end(
    storage: Storage, pools: Pools, identity: Identity, block: SharedBlock
) -> tuple[Any, ExtraBuffers, Stage, Layout]:
    """Return what one end has: its copiers of blocks and extras, the stage over `block`, and its layout."""
    blocks = pools.block_bytes(storage.kv)
    size = blocks.payload_bytes
    extras = ExtraBuffers(storage.companions(pools, blocks), size)
    digests = identity.weights, identity.config, identity.kv_dtype, identity.block_size
    return blocks, extras, Stage(block, block.size // size, size), Layout(*digests, size, extras.num_bytes)
