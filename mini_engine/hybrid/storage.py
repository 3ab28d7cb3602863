"""Lesson 11. The storage of a hybrid model: its memory divided between blocks, states and checkpoints."""

from functools import partial
from typing import NamedTuple

from mini_engine.engine.engine import default_kv_bytes
from mini_engine.engine.pools import Pools
from mini_engine.engine.storage import Storage
from mini_engine.engine_config import EngineConfig
from mini_engine.errors import UserError
from mini_engine.hybrid.fast import native_step_for
from mini_engine.hybrid.gdn_pool import PADDING_SLOT, GdnPool
from mini_engine.hybrid.memory import StateMemory
from mini_engine.hybrid.model import HybridForCausalLM
from mini_engine.hybrid.runner import HybridPlan
from mini_engine.hybrid.store import HybridKv
from mini_engine.kv.block_tensor import KvPool
from mini_engine.kv.cache_coordinator import CacheCoordinator
from mini_engine.kv.manager import blocks_in_budget
from mini_engine.kv.pool_maker import PoolMaker
from mini_engine.kv.prefix_cache import PrefixCache

MOST_CHECKPOINTS = 4  # per request that may run
INTERVAL = 256


class Slots(NamedTuple):
    """State slots: for running requests, and for checkpoints."""

    working: int
    track: int


class Sizes(NamedTuple):
    """Blocks of the KV pool, the null block included, and state slots."""

    num_blocks: int
    slots: Slots


def store_over(model: HybridForCausalLM, kv: KvPool, states: GdnPool) -> HybridKv:
    """Return the store of a hybrid over its pools, with the C++ step of delta nets if the model has packed matrices."""
    return HybridKv(model.config, kv, states, native_step_for(model))


def hybrid_storage(model: HybridForCausalLM, config: EngineConfig, maker: PoolMaker, pools: Pools) -> Storage:
    """Return the storage of a hybrid.

    Args:
        maker: makes the KV pool. pools: of this process, or of all that share the model.

    Raises:
        UserError: an option is invalid, or the memory is too small.
    """
    sizes = sizes_of(model, config, maker.bytes_per_token)
    kv = maker.make(sizes.num_blocks, config.block_size, config.kernel)
    pool = GdnPool.for_model(
        model.config, sizes.slots.working, device=model.device, dtype=model.dtype, max_track_slots=sizes.slots.track
    )
    interval = config.checkpoint_interval or max(1, INTERVAL // config.block_size) * config.block_size
    memory = StateMemory(pools.slots(pool), config.block_size, interval, config.max_drafts)
    # K and V without a checkpoint of the state would never be reused
    prefixes = partial(PrefixCache, capacity=None if sizes.slots.track else 0, memory=memory)
    return Storage(
        store=pools.store(store_over, model, kv=kv, states=pool),
        kv=kv,
        copy=maker.copier(kv),
        plan=HybridPlan(memory.slots_of),
        probe=HybridPlan(lambda request_id: [PADDING_SLOT]),
        coordinator=partial(CacheCoordinator, prefixes=prefixes, memory=memory),
        states=pool,
        slots_of=memory.slots_of,
    )


def sizes_of(model: HybridForCausalLM, config: EngineConfig, bytes_per_token: int) -> Sizes:
    """Divide the memory; at most half of it goes to states. With `num_blocks`, states come on top."""
    seqs, spare = config.max_num_seqs, config.max_drafts
    state_bytes = model.config.state_bytes(model.dtype)
    num_blocks, slots = config.num_blocks, Slots(seqs + spare, seqs)
    if num_blocks is None:
        budget = default_kv_bytes(model.device) if config.kv_bytes is None else config.kv_bytes
        slots = slots_in_budget(budget // 2, state_bytes, seqs, spare)
        used = (1 + slots.working + slots.track) * state_bytes
        num_blocks = blocks_in_budget(budget - used, bytes_per_token, config.block_size)
    track = slots.track if config.max_track_slots is None else config.max_track_slots
    return Sizes(num_blocks, slots._replace(track=track if config.enable_prefix_caching else 0))


def slots_in_budget(budget_bytes: int, bytes_per_slot: int, max_num_seqs: int, num_spare: int = 0) -> Slots:
    """Divide a budget into slots: half for running requests, up to max_num_seqs, and the rest for checkpoints.

    Args:
        num_spare: working slots for drafts, which are reserved first.

    Raises:
        UserError: not even the padding slot, those for drafts and one request fit.
    """
    count = budget_bytes // bytes_per_slot - 1 - num_spare  # without the padding slot
    if count < 1:
        least = "two" if not num_spare else str(2 + num_spare)
        raise UserError(
            f"{least} state slots of {bytes_per_slot / 2**20:.1f} MiB do not fit in {budget_bytes / 2**20:.1f} MiB, "
            "half of the memory for K and V; give more",
            param="kv_bytes",
        )
    seqs = min(max_num_seqs, (count + 1) // 2)
    return Slots(seqs + num_spare, min(count - seqs, MOST_CHECKPOINTS * max_num_seqs))
