"""Lesson 11. Builds an engine for a hybrid model: divides the memory between blocks, states and checkpoints."""

from typing import NamedTuple

from mini_engine.attention.registry import load_kernel
from mini_engine.engine.engine import Engine, default_kv_bytes
from mini_engine.engine.scheduler import SchedulerConfig
from mini_engine.errors import UserError
from mini_engine.hybrid.gdn_pool import GdnPool
from mini_engine.hybrid.manager import HybridCacheManager
from mini_engine.hybrid.model import HybridForCausalLM
from mini_engine.hybrid.native import NativeStep
from mini_engine.hybrid.runner import HybridRunner
from mini_engine.hybrid.scheduler import HybridScheduler
from mini_engine.hybrid.store import HybridKv
from mini_engine.kv.block_tensor import KvPool
from mini_engine.kv.manager import blocks_in_budget

MOST_CHECKPOINTS = 4  # per request that may run
INTERVAL = 256


class Slots(NamedTuple):
    """State slots: for running requests, and for checkpoints."""

    working: int
    track: int


def hybrid_engine(
    model: HybridForCausalLM,
    *,
    kv_bytes: int | None = None,
    num_blocks: int | None = None,
    block_size: int = 16,
    kernel: str = "auto",
    scheduler_config: SchedulerConfig | None = None,
    native_step: NativeStep | None = None,
    enable_prefix_caching: bool = True,
    max_track_slots: int | None = None,
    checkpoint_interval: int | None = None,
) -> Engine:
    """Build an engine with its own pools. Options that `Engine.for_model` has are the same.

    Args:
        kv_bytes: memory for both pools; at most half of it goes to states.
        num_blocks: size of the KV pool in blocks, including the null block; states come on top of it.
        native_step: the C++ step of delta nets; None for torch.
        enable_prefix_caching: keep K, V and checkpoints for requests with the same beginning.
        max_track_slots: number of checkpoints; by default as many as fit, up to four per running request.
        checkpoint_interval: tokens between two checkpoints, a multiple of the block size; by default about 256.

    Raises:
        UserError: an option is invalid, or the memory is too small.
    """
    config, dtype = model.config, model.dtype
    limits = scheduler_config or SchedulerConfig()
    budget = default_kv_bytes(model.device) if kv_bytes is None else kv_bytes
    if num_blocks is None:
        slots = slots_in_budget(budget // 2, config.state_bytes(dtype), limits.max_num_seqs)
        used = (1 + slots.working + slots.track) * config.state_bytes(dtype)
        num_blocks = blocks_in_budget(budget - used, config.kv_bytes_per_token(dtype), block_size)
    else:
        slots = Slots(limits.max_num_seqs, limits.max_num_seqs)
    track = (slots.track if max_track_slots is None else max_track_slots) if enable_prefix_caching else 0
    states = GdnPool.for_model(config, slots.working, device=model.device, dtype=dtype, max_track_slots=track)
    attend = load_kernel(kernel, model.device, dtype)
    kv = KvPool(config.kv_config, num_blocks, block_size, attend, dtype, model.device)
    interval = checkpoint_interval or max(1, INTERVAL // block_size) * block_size
    manager = HybridCacheManager(num_blocks, block_size, kv.copy_blocks, states=states, checkpoint_interval=interval)
    runner = HybridRunner(model, HybridKv(config, kv, states, native_step), manager.slot_of)
    return Engine(config, HybridScheduler(manager, scheduler_config), runner)


def slots_in_budget(budget_bytes: int, bytes_per_slot: int, max_num_seqs: int) -> Slots:
    """Divide a budget into slots: half for running requests, up to max_num_seqs, and the rest for checkpoints.

    Raises:
        UserError: not even the padding slot and one request fit.
    """
    count = budget_bytes // bytes_per_slot - 1  # without the padding slot
    if count < 1:
        raise UserError(
            f"two state slots of {bytes_per_slot / 2**20:.1f} MiB do not fit in {budget_bytes / 2**20:.1f} MiB, half "
            "of the memory for K and V; give more"
        )
    working = min(max_num_seqs, (count + 1) // 2)
    return Slots(working, min(count - working, MOST_CHECKPOINTS * max_num_seqs))
