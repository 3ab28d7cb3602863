"""Course machinery. The composition root: a checkpoint and options in, an engine out.

Each part is made once, in order, and handed to what needs it: layers, pools, connector, coordinator,
scheduler, runner, decoding, engine.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mini_engine.assembly.choices import (
    arrange_of,
    connecting,
    coordinator_of,
    decoding_of,
    identity_of,
    runner_of,
    with_layers,
)
from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.assembly.layout import storage_of
from mini_engine.assembly.loading import as_dtype, load, reader_of
from mini_engine.assembly.pools import OWN_POOLS, Pools
from mini_engine.assembly.storage import Storage
from mini_engine.base.errors import UserError
from mini_engine.base.values import shown
from mini_engine.checkpoint.directory import resolve_checkpoint
from mini_engine.engine.engine import Engine, default_kv_bytes
from mini_engine.engine.scheduler import Scheduler
from mini_engine.families.family import check_dtype_and_device
from mini_engine.kv.manager import KvCacheManager
from mini_engine.model.causal_lm import CausalLM

if TYPE_CHECKING:
    from mini_engine.distributed.tensor_parallel.processes import Ranks
    from mini_engine.handover.prefill import Built
    from mini_engine.kv.connector import KvConnector


def open_engine(
    path_or_hub_id: str | Path,
    config: EngineConfig,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    capture: Any = None,
) -> Engine:
    """Return an engine for a checkpoint, in one process or over several (lesson 18). Its runner's `close` ends these.

    Args:
        dtype, device: as for `load`. capture: as for `build_engine`.

    Raises:
        UserError: the checkpoint or an option cannot work here; one sentence says why.
    """
    with prefill_workers(path_or_hub_id, config, dtype, device) as workers:
        if config.tensor_parallel_size == 1:
            return build_engine(load(path_or_hub_id, dtype, device), config, capture=capture, workers=workers)
        from mini_engine.distributed.tensor_parallel.limits import check_shareable, device_of_ranks

        check_shareable(config)
        device = device_of_ranks(device, config.tensor_parallel_size)
        ranks, identity = start_ranks(path_or_hub_id, config, as_dtype(dtype, device), device=device)
        try:  # this process is rank 0
            return over_ranks(ranks, replace(config, cuda_graphs=False), identity, capture, workers)
        except BaseException:
            ranks.close()
            raise


@contextmanager
def prefill_workers(path_or_hub_id: str | Path, config: EngineConfig, dtype: Any, device: Any) -> Iterator[Any]:
    """Start lesson 19's workers, or yield None. They end if the engine that they are for cannot be made."""
    if not config.prefill_workers:
        yield None
        return
    from mini_engine.handover.opening import start_workers

    workers = start_workers(resolve_checkpoint(path_or_hub_id), config, dtype, device, build_worker)
    try:
        yield workers
    except BaseException:
        workers.close()
        raise


def build_worker(path: str, config: EngineConfig, dtype: str, device: str, block: Any, say: Any) -> "Built":
    """Load the model in a prefill worker's process; return its engine, its connector and its layout (lesson 19)."""
    from mini_engine.handover.opening import sending_connector
    from mini_engine.handover.prefill import Built
    from mini_engine.tiers import opening as tiers

    model = load(path, dtype, device)
    identity, ends = tiers.identity_of(model, config), []  # the worker's own config would need none

    def connect(storage: Storage) -> "KvConnector":
        ends.append(sending_connector(storage, config, identity, block, say))
        return ends[0][0]

    engine = assemble(with_layers(model, config.backend), config, connect=connect)
    [(connector, layout)] = ends
    return Built(engine, connector, layout)


def build_engine(
    model: CausalLM, config: EngineConfig | None = None, *, capture: Any = None, workers: Any = None, **options: Any
) -> Engine:
    """Return an engine for a loaded model, with the fastest parts that work here.

    Args:
        config: how to build it; or give fields of `EngineConfig` by name.
        capture: how decode steps are captured (lesson 10): `no_graph` runs them padded, on any device. None: with CUDA
            graphs where that is possible.
        workers: compute prompts for it (lesson 19); by default none.

    Raises:
        UserError: an option is invalid or cannot work here.
    """
    config = config or EngineConfig.of(options)
    if config.cuda_graphs and model.device.type != "cuda":
        raise UserError(
            f"cuda_graphs is True, but the model is on the device {shown(str(model.device))}, where no step can be "
            "captured; leave it out",
            param="cuda_graphs",
        )
    identity = identity_of(model, config)
    model = with_layers(model, config.backend)
    return assemble(model, config, connect=connecting(model, config, identity, OWN_POOLS, workers), capture=capture)


def assemble(
    model: Any,
    config: EngineConfig,
    pools: Pools = OWN_POOLS,
    connect: "Callable[[Storage], KvConnector | None]" = lambda storage: None,
    capture: Any = None,
) -> Engine:
    """Make the storage, the parts that decide, each once, and the engine, around a model with its layers.

    Args:
        pools: of this process, or of all that share the model. connect: makes the coordinator's connector.
        capture: as for `build_engine`.
    """
    budget = default_kv_bytes(model.device) if config.kv_bytes is None else config.kv_bytes
    storage = storage_of(model, config, pools, budget)
    runner = runner_of(model, storage, config, pools.group, capture)
    coordinator = coordinator_of(storage, connect(storage))
    manager = KvCacheManager(storage.kv.num_blocks, config.block_size, storage.copy, coordinator)
    scheduler = Scheduler(manager, config.scheduler_config, arrange_of(config, manager))
    return Engine(model.config, scheduler, runner, decoding_of(config, manager))


def start_ranks(
    path_or_hub_id: str | Path, config: EngineConfig, dtype: torch.dtype, transport: str = "auto", device: str = "cpu"
) -> "tuple[Ranks, Any]":
    """Start the other ranks of a model, and join them. Return them, and what tiers call the model's records.

    Args:
        transport, device: as for `Ranks`.

    Raises:
        UserError: the model cannot be shared by so many ranks, or one of them ended before it was ready.
    """
    from mini_engine.distributed.tensor_parallel.processes import Ranks
    from mini_engine.distributed.tensor_parallel.shard import share_of, shared_by

    check_dtype_and_device(dtype, device)
    directory = resolve_checkpoint(path_or_hub_id)
    read = reader_of(directory).stored
    stored = read(directory)
    share_of(stored.config, config.tensor_parallel_size, shared_by(stored.config))
    ranks = Ranks(
        str(directory), config.tensor_parallel_size, read, dtype, config.backend, transport=transport, device=device
    )
    try:
        identity = identity_of(stored, config, dtype)
        ranks.join(stored)
    except BaseException:
        ranks.close()
        raise
    return ranks, identity


def over_ranks(
    ranks: "Ranks", config: EngineConfig, identity: Any = None, capture: Any = None, workers: Any = None
) -> Engine:
    """Return an engine over ranks that have joined. Its pools are new; the others drop those of an engine before it.

    Args:
        identity: from `start_ranks`. capture, workers: as for `build_engine`.
    """
    from mini_engine.distributed.tensor_parallel.pools import SharedPools

    pools = SharedPools(ranks)
    return assemble(ranks.model, config, pools, connecting(ranks.model, config, identity, pools, workers), capture)
