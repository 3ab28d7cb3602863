"""Lesson 12. Opens an engine's tiers: their sizes, what their records are called, and what pays to bring back."""

import hashlib
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from mini_engine.engine_config import EngineConfig
from mini_engine.errors import UserError
from mini_engine.tiers.break_even import BreakEven, measured_copy, measured_disk, measured_rate
from mini_engine.tiers.keys import Identity, config_digest
from mini_engine.tiers.store import Blocks, BlockStore, MinTokens
from mini_engine.tiers.tiers import Tiers

HOST_BYTES = 2**28
DISK_BYTES = 2**32
PROBE_TOKENS = 64

log = logging.getLogger(__name__)


def weights_digest(model: nn.Module) -> str:
    """Return the sha256 of a model's parameters: names, shapes, dtypes and bytes, in the order of their names."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}\n".encode())
        digest.update(weight.detach().contiguous().cpu().view(torch.uint8).flatten().numpy().data)
    return digest.hexdigest()


def identity_of(model: nn.Module, config: EngineConfig) -> Identity:
    """Return what all records of an engine have in common. Call it while the model has the weights that were loaded."""
    dtype = str(model.dtype).removeprefix("torch.") if config.kv_dtype == "auto" else config.kv_dtype
    return Identity(weights_digest(model), config_digest(model.config), dtype, config.block_size)


def open_tiers(
    config: EngineConfig, identity: Identity, blocks: Blocks, state_bytes: int, prefill: Callable[[int], None]
) -> BlockStore:
    """Open the tiers that the options ask for.

    Args:
        blocks: copies blocks of the pool. state_bytes: of the state that goes with them; 0 without one.
        prefill: computes so many tokens in the pool, which no request uses yet, to measure what that takes.

    Raises:
        UserError: the directory or the key file cannot be used, or the host tier is smaller than two blocks.
    """
    directory = None if config.kv_cache_dir is None else Path(config.kv_cache_dir)
    key_file = None if config.kv_cache_key_file is None else Path(config.kv_cache_key_file)
    host_bytes = HOST_BYTES if config.kv_host_bytes is None else config.kv_host_bytes
    disk_bytes = DISK_BYTES if config.kv_disk_bytes is None else config.kv_disk_bytes
    if host_bytes < 2 * blocks.payload_bytes:
        raise UserError(
            f"kv_host_bytes is {host_bytes}, and a block of {config.block_size} tokens takes {blocks.payload_bytes}; "
            "give room for at least two",
            param="kv_host_bytes",
        )
    tiers = Tiers.of_size(directory, host_bytes, disk_bytes, key_file)
    if config.kv_always:
        return BlockStore(tiers, blocks, identity)
    rate = measured_rate(prefill, PROBE_TOKENS)
    found = break_evens(rate, directory, blocks, config.block_size, state_bytes)
    min_tokens = MinTokens(**{tier: one.num_tokens for tier, one in found.items()})
    log.info("bringing KV back pays from %s tokens on", min_tokens)
    return BlockStore(tiers, blocks, identity, min_tokens)


def break_evens(
    rate: float, directory: Path | None, blocks: Blocks, block_size: int, state_bytes: int
) -> dict[str, BreakEven]:
    """Measure the tiers, "host" and "disk". A directory that cannot be written has none: that cannot be measured.

    Args:
        rate: tokens that prefill computes in a second.
    """
    speeds = {"host": measured_copy(blocks)}
    with suppress(OSError):
        if directory is not None:
            speeds["disk"] = measured_disk(directory, blocks.payload_bytes)
    each = blocks.payload_bytes // block_size
    return {
        tier: BreakEven(rate, each, speed.bandwidth, speed.latency + state_bytes / speed.bandwidth)
        for tier, speed in speeds.items()
    }
