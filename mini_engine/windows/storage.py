"""Lesson 15. The storage of a model with windows: one pool and one allocator for all groups, and the window memory."""

from dataclasses import fields
from functools import partial
from typing import Any

from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.engine.pools import Pools
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.engine.storage import Storage
from mini_engine.engine_config import EngineConfig
from mini_engine.kv.block_tensor import KvPool
from mini_engine.kv.cache_coordinator import CacheCoordinator
from mini_engine.kv.coordinator import CopyBlocks
from mini_engine.kv.prefix_cache import PrefixCache
from mini_engine.kv.refcount import RefCountedAllocator
from mini_engine.windows.groups import group_size, num_window_groups, places_of
from mini_engine.windows.memory import WindowMemory
from mini_engine.windows.plan import WindowPlan, same_in_all
from mini_engine.windows.store import GroupedKv
from mini_engine.windows.window_config import WindowConfig


def shape_of_pool(config: WindowConfig) -> Qwen3Config:
    """Return the shape for the pool: a block has K and V of one group's layers, and no window."""
    shape: dict[str, Any] = {field.name: getattr(config, field.name) for field in fields(Qwen3Config)}
    shape["num_hidden_layers"] = group_size(places_of(config.layer_types))
    return Qwen3Config(**shape)


def window_storage(model: Any, config: EngineConfig, kv: KvPool, copy: CopyBlocks, pools: Pools) -> Storage:
    """Return the storage of a model with windows.

    Args:
        kv: the pool, of `shape_of_pool`. copy: copies its blocks, in every process of the model. pools: of them all.
    """
    store = pools.store(GroupedKv.for_model, model, kv=kv)
    num_groups = num_window_groups(store.places)
    allocator = RefCountedAllocator(kv.num_blocks, config.block_size)
    memory = WindowMemory(allocator, model.config.sliding_window, num_groups, most_in_step(config))
    # without prefix caching: a tree that keeps nothing
    capacity = None if config.enable_prefix_caching else 0
    prefixes = partial(PrefixCache, capacity=capacity, memory=memory, allocator=allocator)
    return Storage(
        store=store,
        kv=kv,
        copy=copy,
        plan=WindowPlan(memory.tables_of, num_groups),
        probe=same_in_all(num_groups),
        coordinator=partial(CacheCoordinator, prefixes=prefixes, memory=memory),
        windows=memory,
    )


def most_in_step(config: EngineConfig) -> int:
    """Return the most tokens that a step computes of one request: a chunk of its prompt, or a token and its drafts."""
    limits = config.scheduler_config or SchedulerConfig()
    chunk = min(limits.chunked_prefill_size, limits.max_num_batched_tokens)
    return max(chunk, min(1 + config.max_drafts, limits.max_num_batched_tokens))
