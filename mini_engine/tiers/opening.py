"""Lesson 12. Opens an engine's tiers: their sizes, what their records are called, and what pays to bring back."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.base.errors import UserError
from mini_engine.checkpoint.stored import Stored
from mini_engine.model.causal_lm import CausalLM
from mini_engine.tiers.blocks import BlockBytes
from mini_engine.tiers.break_even import BreakEven, measured_copy, measured_disk, measured_rate
from mini_engine.tiers.companions import Companion, bytes_behind, num_each
from mini_engine.tiers.copies import beside_steps
from mini_engine.tiers.keys import Identity, config_digest
from mini_engine.tiers.store import Blocks, BlockStore, MinTokens, Reader
from mini_engine.tiers.tiers import MAX_WAITING, Tiers

HOST_BYTES = 2**28
DISK_BYTES = 2**32
PROBE_TOKENS = 64

log = logging.getLogger(__name__)


def weights_digest(model: nn.Module) -> str:
    """Return the sha256 of a model's parameters: names, shapes, dtypes and bytes, in the order of their names."""
    weights = sorted(model.named_parameters())
    return digest_of((name, tuple(weight.shape), weight.dtype, [weight]) for name, weight in weights)


def stored_digest(stored: Stored, dtype: torch.dtype) -> str:
    """Return the `weights_digest` of the model that is loaded in this dtype, reading it piece by piece."""
    shapes = sorted(stored.shapes.items())
    return digest_of((name, shape, stored.dtype_of(name, dtype), stored.pieces(name, dtype)) for name, shape in shapes)


def digest_of(weights: Iterable[tuple[str, tuple[int, ...], torch.dtype, Iterable[Tensor]]]) -> str:
    """Return the sha256 of weights: of each its name, shape, dtype, and its rows in one or more pieces."""
    digest = hashlib.sha256()
    for name, shape, dtype, pieces in weights:
        digest.update(f"{name} {shape} {dtype}\n".encode())
        for piece in pieces:
            digest.update(piece.detach().contiguous().cpu().view(torch.uint8).flatten().numpy().data)
    return digest.hexdigest()


def identity_of(model: CausalLM, config: EngineConfig) -> Identity:
    """Return the identity of an engine's records. Call it while the model has the weights that were loaded."""
    return identity(weights_digest(model), model.config, model.dtype, config)


def identity(digest: str, shape: Any, dtype: torch.dtype, config: EngineConfig) -> Identity:
    """Return the identity of records. digest: of all weights. shape: the whole model's config."""
    kv_dtype = str(dtype).removeprefix("torch.") if config.kv_dtype == "auto" else config.kv_dtype
    return Identity(digest, config_digest(shape), kv_dtype, config.block_size)


def open_tiers(
    config: EngineConfig,
    identity: Identity,
    blocks: Blocks,
    companions: Sequence[Companion],
    prefill: Callable[[int], None],
) -> BlockStore:
    """Open the tiers that the options ask for.

    Args:
        blocks: copies blocks of the pool. companions: what goes with them.
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
    tiers = Tiers.of_size(directory, host_bytes, disk_bytes, key_file, num_each(companions) * MAX_WAITING)
    reader = reader_for(blocks, tiers)
    if config.kv_always:
        return BlockStore(tiers, blocks, identity, reader=reader)
    rate = measured_rate(prefill, PROBE_TOKENS)
    found = break_evens(rate, directory, blocks, config.block_size, bytes_behind(companions))
    min_tokens = MinTokens(**{tier: one.num_tokens for tier, one in found.items()})
    log.info("bringing KV back pays from %s tokens on", min_tokens)
    return BlockStore(tiers, blocks, identity, min_tokens, reader)


def reader_for(blocks: Blocks, tiers: Tiers) -> Reader:
    """Return the tiers' reader of blocks: beside the steps if this process has them on a GPU."""
    if not isinstance(blocks, BlockBytes) or blocks.device.type != "cuda":
        return Reader(blocks)
    reader = beside_steps(blocks)
    tiers.feeders.append(reader.copier)
    return reader


def break_evens(
    rate: float, directory: Path | None, blocks: Blocks, block_size: int, more_bytes: int
) -> dict[str, BreakEven]:
    """Measure the tiers, "host" and "disk". A directory that cannot be written has none: that cannot be measured.

    Args:
        rate: tokens that prefill computes in a second. more_bytes: of what comes back with any number of blocks.
    """
    speeds = {"host": measured_copy(blocks)}
    with suppress(OSError):
        if directory is not None:
            speeds["disk"] = measured_disk(directory, blocks.payload_bytes)
    each = blocks.payload_bytes // block_size
    return {
        tier: BreakEven(rate, each, speed.bandwidth, speed.latency + more_bytes / speed.bandwidth)
        for tier, speed in speeds.items()
    }
