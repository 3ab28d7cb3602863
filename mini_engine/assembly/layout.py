"""Course machinery. Turns what each layer of a model keeps into pools, memories and the store.

Elsewhere, only the modules of a kind's own lesson look for it. Full layers and windows are groups of one pool, states
have a pool of their own, and a prefix is cached as far as all of them can resume from it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.assembly.pools import Pools
from mini_engine.assembly.storage import MemoryKind, Storage
from mini_engine.base.errors import OutOfBlocks, UserError
from mini_engine.kv.block_tensor import KvPool, KvShape
from mini_engine.kv.coordinator import KvCoordinator
from mini_engine.kv.manager import blocks_in_budget
from mini_engine.kv.pool_maker import PoolMaker
from mini_engine.model.kinds import Full, Kind, Latent, State, Window, attending, state_bytes

if TYPE_CHECKING:  # lesson 8's, which an engine without prefix caching does without
    from mini_engine.kv.eviction import EvictionPolicy
    from mini_engine.kv.memory import CacheMemory


def storage_of(model: Any, config: EngineConfig, pools: Pools, budget: int) -> Storage:
    """Return the storage of a model with its layers.

    Args:
        pools: creates pools in all processes of the model. budget: bytes for all of them, if `num_blocks` is not given.

    Raises:
        UserError: the memory is too small, or such layers cannot be stored together.
    """
    layers = model.config.layers
    check_kinds(layers)
    maker = pools.maker(pool_maker(model, config))
    with told_of("kv_bytes"):
        num_blocks, slots = divided(layers, model, config, maker.bytes_per_token, budget)
        kv = maker.make(num_blocks, config.block_size, config.kernel)
    states = state_pool(model, *slots) if slots else None
    policy = eviction_policy(config, num_blocks)
    kinds = [] if states is None else [state_kind(states, pools, config, policy)]
    allocator = None
    if has(Window, layers):
        kind, allocator = window_kind(layers, num_blocks, config)
        kinds.insert(0, kind)  # its tables first: a state's slots are added to them
    caches = config.enable_prefix_caching and (states is None or states.max_track_slots > 0)
    memories = [kind.memory for kind in reversed(kinds) if kind.memory is not None]
    coordinator = coordinator_for(memories, caches, allocator, policy, watcher_of(config))
    own = {"kv": kv} if states is None else {"kv": kv, "states": states}
    store = kv if set(layers) == {Full()} else pools.store(store_of, model, **own)
    return Storage(store, kv, maker.copier(kv), coordinator, kinds)


def has(kind: type[Kind], layers: Sequence[Kind]) -> bool:
    """Return True if one of the layers is of this kind."""
    return any(isinstance(layer, kind) for layer in layers)


def check_kinds(layers: Sequence[Kind]) -> None:
    """Raise UserError if the layers cannot be stored together."""
    for kind, name in ((State, "states"), (Window, "windows"), (Latent, "latents")):
        if len(found := {layer for layer in layers if isinstance(layer, kind)}) > 1:
            raise UserError(f"the layers have {name} of {len(found)} sizes, {found}; a model needs one for all")
    if has(Latent, layers) and (has(Window, layers) or has(Full, layers)):
        raise UserError("some layers keep latents and others K and V, which no pool here holds together")


def pool_maker(model: Any, config: EngineConfig) -> PoolMaker:
    """Return the maker of the pool for K and V, or latents, in this KV dtype."""
    shape, place = kv_shape(model.config), (model.dtype, model.device)
    has_latents = has(Latent, model.config.layers)
    if config.kv_dtype == "auto":
        return PoolMaker(shape, *place, latents=has_latents)
    from mini_engine.quantized.formats import FORMATS
    from mini_engine.quantized.pool import RowPoolMaker

    return RowPoolMaker(shape, *place, FORMATS[config.kv_dtype], latents=has_latents)


def kv_shape(config: Any) -> KvShape:
    """Return the shape of a model's KV pool: a tensor for each layer that attends, shared by groups of windows."""
    layers = attending(config.layers)
    num_layers = len(layers)
    if has(Window, layers):
        from mini_engine.windows.groups import group_size, places_of

        num_layers = group_size(places_of(layers))
    return KvShape(num_layers, config.k_shape, config.v_shape)


def divided(
    layers: Sequence[Kind], model: Any, config: EngineConfig, bytes_per_token: int, budget: int
) -> tuple[int, Sequence[int]]:
    """Return the blocks of the KV pool, and the state slots for requests and for checkpoints, if layers keep states."""
    if has(State, layers):
        from mini_engine.hybrid.sizes import sizes_of

        return sizes_of(state_bytes(layers, model.dtype), config, bytes_per_token, budget)
    if config.num_blocks is not None:
        return config.num_blocks, ()
    return blocks_in_budget(budget, bytes_per_token, config.block_size), ()


def state_pool(model: Any, max_reqs: int, max_track_slots: int) -> Any:
    """Return lesson 11's pool for the states of this model, or of a rank's share of it."""
    from mini_engine.hybrid.gdn_pool import GdnPool

    place = dict(device=model.device, dtype=model.dtype)
    return GdnPool.for_model(model.config, max_reqs, max_track_slots=max_track_slots, **place)


def store_of(model: Any, kv: KvPool, states: Any = None) -> Any:
    """Return the store that a model, or a rank's share of it, reads and writes: the pool, or a store around it.

    Args:
        states: lesson 11's pool, if layers keep states.
    """
    layers, store = attending(model.config.layers), kv
    if has(Window, layers):
        from mini_engine.windows.store import GroupedKv

        store = GroupedKv(layers, kv)
    elif has(Latent, layers):
        from mini_engine.latents.store import LatentKv

        store = LatentKv(model.config, kv)
    if states is None:
        return store
    from mini_engine.hybrid.store import HybridKv

    return HybridKv(store, states)


def state_kind(states: Any, pools: Pools, config: EngineConfig, policy: "EvictionPolicy | None") -> MemoryKind:
    """Return what layers with a state bring (lesson 11). policy: of the prefix cache."""
    from mini_engine.hybrid.gdn_pool import PADDING_SLOT
    from mini_engine.hybrid.memory import StateMemory
    from mini_engine.hybrid.plan import SlotRows, add_slots
    from mini_engine.hybrid.sizes import interval_of

    def companion(pools: Pools, blocks: Any) -> Any:
        from mini_engine.tiers.states import StateCompanion

        return StateCompanion(pools.state_bytes(states), memory.slots_of)

    waiting = policy.waiting if policy else tuple
    memory = StateMemory(pools.slots(states), config.block_size, interval_of(config), config.max_drafts, waiting)
    probe = partial(add_slots, lambda request_id: [PADDING_SLOT])
    plan, rows = partial(add_slots, memory.slots_of), partial(SlotRows, memory.slots_of)
    return MemoryKind(memory, plan, probe, rows, companion)


def window_kind(layers: Sequence[Kind], num_blocks: int, config: EngineConfig) -> tuple[MemoryKind, Any]:
    """Return what layers with a window bring (lesson 15), and the allocator from which all groups draw blocks.

    A model with a single layer that attends has group 0 alone, which keeps all tokens: no memory, and no allocator.
    """
    from mini_engine.kv.refcount import RefCountedAllocator
    from mini_engine.windows.companion import WindowCompanion
    from mini_engine.windows.groups import num_window_groups, places_of
    from mini_engine.windows.memory import WindowMemory
    from mini_engine.windows.plan import GroupRows, add_tables
    from mini_engine.windows.store import with_groups

    def probe(meta: Any, chunks: Any) -> Any:  # no request has blocks yet: every group has those of group 0
        return with_groups(meta, [meta.block_table] * num_groups)

    [window] = {kind.size for kind in layers if isinstance(kind, Window)}
    num_groups = num_window_groups(places_of(attending(layers)))
    allocator = RefCountedAllocator(num_blocks, config.block_size)
    memory = WindowMemory(allocator, window, num_groups, config.most_in_step)
    plan, rows = partial(add_tables, memory.tables_of, num_groups), partial(GroupRows, memory.tables_of, num_groups)
    if num_groups == 0:
        return MemoryKind(None, probe, probe, rows, None), None
    return MemoryKind(memory, plan, probe, rows, lambda _, blocks: WindowCompanion(blocks, memory)), allocator


def coordinator_for(
    memories: "Sequence[CacheMemory]", caches: bool, allocator: Any, policy: Any, watcher: Any = None
) -> Callable[..., KvCoordinator]:
    """Return the maker of the manager's coordinator.

    Args:
        memories: what requests need beside their tables, the one that keeps the fewest places first.
        caches: prefixes are shared. allocator, policy, watcher: as for lesson 8's PrefixCache; None for its own.
    """
    if not memories and not caches:
        return KvCoordinator
    from mini_engine.kv.cache_coordinator import CacheCoordinator  # without prefix caching, lesson 8 is not needed
    from mini_engine.kv.memory import NO_MEMORY
    from mini_engine.kv.prefix_cache import PrefixCache
    from mini_engine.kv.watcher import NO_WATCHER

    memory = memories[0] if memories else NO_MEMORY
    if len(memories) > 1:
        from mini_engine.kv.memories import Memories

        memory = Memories(memories)
    # without prefix caching: a tree that keeps nothing
    capacity = None if caches else 0
    prefixes = partial(
        PrefixCache,
        capacity=capacity,
        policy=policy,
        memory=memory,
        allocator=allocator,
        watcher=watcher or NO_WATCHER,
    )
    return partial(CacheCoordinator, prefixes=prefixes)


def eviction_policy(config: EngineConfig, num_blocks: int) -> "EvictionPolicy | None":
    """Return the policy of a prefix cache in a pool of this size (lessons 8 and 20); None without prefix caching."""
    if not config.enable_prefix_caching:
        return None
    from mini_engine.kv.eviction import POLICIES, EvictionPolicy

    policy: EvictionPolicy
    if config.eviction_policy == "slru":
        from mini_engine.agents.policies import SLRU

        policy = SLRU()
    elif config.eviction_policy == "tlru":
        from mini_engine.agents.policies import TLRU

        size = config.block_size
        policy = TLRU((config.tlru_threshold or 0) // size, -(-(config.tlru_next_prompt_estimate or 0) // size))
    else:
        policy = POLICIES[config.eviction_policy]()
    if not config.enable_sessions:
        return policy
    from mini_engine.agents.session import Limits
    from mini_engine.agents.sessions import Sessions

    return Sessions(Limits.of_pool(num_blocks), policy)


def watcher_of(config: EngineConfig) -> Any:
    """Return lesson 20's publisher of what the prefix cache holds, or None.

    Raises:
        UserError: an endpoint cannot be opened, or a library is missing.
    """
    if config.kv_events is None:
        return None
    from mini_engine.agents.publisher import Publisher

    return Publisher(config.block_size, config.kv_events, config.kv_events_replay, config.kv_events_format)


@contextmanager
def told_of(param: str) -> Iterator[None]:
    """Raise UserError about this option in place of OutOfBlocks: the pool would hold no block for requests."""
    try:
        yield
    except OutOfBlocks as error:
        raise UserError(str(error), param=param) from None
