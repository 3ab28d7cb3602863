"""Course machinery. The parts of an engine that its config chooses: layers, pools, tiers, guesses, runner.

Only the modules of this room know which parts the lessons have added. Each is imported when it is chosen, so an engine
without lesson 9's layers or lesson 8's tree does not need their files.
"""

import sys
import weakref
from array import array
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.assembly.pools import Pools
from mini_engine.assembly.storage import Storage
from mini_engine.base.errors import UserError
from mini_engine.engine.request import Request
from mini_engine.engine.runner import Group, ModelRunner, Runner
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Chunk, Decoding, keep_order
from mini_engine.families import family_named
from mini_engine.kv.coordinator import KvCoordinator
from mini_engine.kv.manager import KvCacheManager

if TYPE_CHECKING:
    from mini_engine.kv.connector import KvConnector
    from mini_engine.speculation.options import Speculation


def with_layers(model: Any, backend: str) -> Any:
    """Return the model with the layers of this backend. It takes over the weights of `model`.

    If lesson 10's layers do not work here, "auto" keeps the model's own and says so.

    Raises:
        UserError: the backend does not work for this model or on this machine.
    """
    family = family_named(model.config.model_type)
    if family.can_fuse and (backend == "fused" or (backend == "auto" and model.device.type == "cuda")):
        from mini_engine.layers.fused_layers import fuse

        try:
            return fuse(model)
        except UserError as why:
            if backend == "fused":
                raise
            sys.stderr.write(f"layers: {why}. Using the reference layers: the same tokens, but more launches a step.\n")
            return model
    if backend == "reference" or (backend == "auto" and model.device.type != "cpu"):
        return model
    from mini_engine.layers.fast_model import speed_up

    return speed_up(model, backend, decoder=family.decoder)


def identity_of(model: Any, config: EngineConfig, dtype: torch.dtype | None = None) -> Any:
    """Return the identity that tiers put into this model's records and prefill workers compare; None without either.

    It hashes the weights, so it comes before the layers are replaced.

    Args:
        model: loaded, or the `Stored` tensors of one that each process loads a part of, in this dtype (lesson 18).
    """
    if not config.needs_identity:
        return None
    from mini_engine.tiers import opening as tiers

    if dtype is None:
        return tiers.identity_of(model, config)
    return tiers.identity(tiers.stored_digest(model, dtype), model.config, dtype, config)


def connecting(
    model: Any, config: EngineConfig, identity: Any, pools: Pools, workers: Any
) -> "Callable[[Storage], KvConnector | None]":
    """Return the maker of the connector over a storage: lesson 12's tiers, lesson 19's workers, both, or none."""

    def connect(storage: Storage) -> "KvConnector | None":
        tiers = tier_connector(model, storage, config, identity, pools) if config.has_tiers else None
        if workers is None:
            return tiers
        from mini_engine.handover.either import EitherConnector
        from mini_engine.handover.opening import receiving_connector

        receiving = receiving_connector(workers, storage, config, identity, pools)
        return receiving if tiers is None else EitherConnector(tiers, receiving)

    return connect


def tier_connector(model: Any, storage: Storage, config: EngineConfig, identity: Any, pools: Pools) -> "KvConnector":
    """Return lesson 12's connector. Its tiers are closed when it is gone or the process ends."""
    from mini_engine.tiers.connector import TierConnector
    from mini_engine.tiers.opening import open_tiers

    blocks = pools.block_bytes(storage.kv)
    companions = storage.companions(pools, blocks)
    store = open_tiers(config, identity, blocks, companions, prober(model, storage, pools.group))
    connector = TierConnector(store, companions, config.enable_sessions)
    weakref.finalize(connector, store.tiers.close)
    return connector


def prober(model: Any, storage: Storage, group: Group) -> Callable[[int], None]:
    """Return a function that computes a number of tokens, as many as fit, in a pool that no request uses yet."""
    runner = ModelRunner(model, storage.store, storage.probe, group)

    def prefill(num_tokens: int) -> None:
        num_tokens = min(num_tokens, (storage.kv.num_blocks - 1) * runner.block_size)
        request = Request("probe", [0] * num_tokens, SamplingParams(max_tokens=1))
        blocks = array("i", range(1, 1 + -(-num_tokens // runner.block_size)))
        runner.run([Chunk(request, 0, num_tokens, blocks)])

    return prefill


def coordinator_of(storage: Storage, connector: "KvConnector | None") -> Callable[..., KvCoordinator]:
    """Return the maker of the manager's coordinator, with a connector if there is one."""
    if connector is None:
        return storage.coordinator
    if storage.coordinator is not KvCoordinator:
        return partial(storage.coordinator, connector=connector)
    from mini_engine.kv.cache_coordinator import CacheCoordinator
    from mini_engine.kv.prefix_cache import PrefixCache

    prefixes = partial(PrefixCache, capacity=0)  # nothing is cached, but KV arrives
    return partial(CacheCoordinator, prefixes=prefixes, connector=connector)


def arrange_of(config: EngineConfig, manager: KvCacheManager) -> Callable[[list[Request]], None]:
    """Return what sorts waiting requests before they are admitted (lesson 20), or leaves them in their order."""
    from mini_engine.kv.cache_coordinator import CacheCoordinator

    coordinator = manager.coordinator
    if not config.longest_prefix_first or not isinstance(coordinator, CacheCoordinator):
        return keep_order
    from mini_engine.agents.longest_prefix import LongestPrefixFirst

    prefixes = coordinator.prefixes
    return LongestPrefixFirst(lambda one: prefixes.peek(one.token_ids, one.namespace, manager.tables).num_tokens)


def decoding_of(config: EngineConfig, manager: KvCacheManager) -> Decoding:
    """Return lesson 14's part that guesses, or the one that guesses nothing."""
    if config.speculate is None:
        return Decoding()
    from mini_engine.kv.cache_coordinator import CacheCoordinator
    from mini_engine.speculation.speculator import speculator_of

    coordinator = manager.coordinator
    tree = coordinator.prefixes.tree if isinstance(coordinator, CacheCoordinator) else None
    return speculator_of(cast("Speculation", config.speculate), tree)


def runner_of(model: Any, storage: Storage, config: EngineConfig, group: Group, capture: Any) -> Runner:
    """Return lesson 10's runner where device and kernel allow it, otherwise lesson 5's.

    Raises:
        UserError: captured steps are asked for, and this kernel or this model cannot be recorded.
    """
    eager = ModelRunner(model, storage.store, storage.plan, group)
    if capture is None and (config.cuda_graphs is False or storage.kv.device.type != "cuda"):
        return eager
    from mini_engine.gpu.graphs import ExtrasInTurn, GraphRunner, can_record, counts_on_host, runner_for

    extras = ExtrasInTurn([kind.rows() for kind in storage.kinds])
    if capture is not None:
        return GraphRunner(eager, config.max_num_seqs, capture, extras)
    if config.cuda_graphs and not can_record(storage.kv):
        raise UserError(
            f"cuda_graphs is True, but the kernel {storage.kv.kernel.name} reads lengths on the host, which cannot be "
            "captured; use kernel triton, or leave it out",
            param="cuda_graphs",
        )
    if counts_on_host(model):
        if config.cuda_graphs:
            raise UserError(
                "cuda_graphs is True, but the rows of each expert are counted on the host, which cannot be captured; "
                "leave it out",
                param="cuda_graphs",
            )
        return eager
    return runner_for(eager, config.max_num_seqs, extras)
