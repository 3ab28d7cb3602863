"""Course machinery. The composition root: a checkpoint and options in, an engine out.

Only this module knows which backends, managers and runners the lessons have added. Each is imported when it is chosen,
so an engine without lesson 9's layers or lesson 8's tree does not need their files.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mini_engine.config import DTYPES, read_json
from mini_engine.engine.engine import Engine, PoolMaker
from mini_engine.engine.runner import ModelRunner
from mini_engine.errors import UserError
from mini_engine.kv.manager import KvCacheManager
from mini_engine.model.qwen3 import Qwen3ForCausalLM
from mini_engine.weights import load_model, resolve_checkpoint

if TYPE_CHECKING:
    from mini_engine.speculation.config import Speculation

BACKENDS = ("auto", "packed", "torch", "fused", "reference")
KV_DTYPES = ("auto", "int8")


def build_engine(
    model: Qwen3ForCausalLM,
    *,
    backend: str = "auto",
    cuda_graphs: bool | None = None,
    enable_prefix_caching: bool = True,
    kv_cache_dir: str | Path | None = None,
    kv_host_bytes: int | None = None,
    kv_disk_bytes: int | None = None,
    kv_dtype: str = "auto",
    kv_always: bool = False,
    speculate: "int | Speculation | None" = None,
    **options: Any,
) -> Engine:
    """Return an engine for a loaded model, with the fastest parts that work here.

    Args:
        backend: which code runs the layers: on a CPU "packed" or "torch" (lesson 9), on a GPU "fused" (lesson 10),
            anywhere "reference" (lesson 0's own layers). "auto" is the first of these that works.
        cuda_graphs: replay captured decode steps (lesson 10). None: where device, kernel and pool allow it and the
            capture succeeds. True: the same, but refuse a pool that cannot be captured. False: never.
        enable_prefix_caching: share prefixes between requests (lesson 8).
        kv_cache_dir, kv_host_bytes, kv_disk_bytes: keep evicted prefixes in host memory and in this directory
            (lesson 12). With none of them there are no tiers; without prefix caching there can be none.
        kv_dtype: "int8" stores K and V as int8 with a scale for each token and head (lesson 12): about twice the tokens
            in the same memory, and answers that are close to those of "auto", the model's own dtype, but not the same.
        kv_always: bring KV back whenever it is found, not only where a measurement at the start says that it pays.
        speculate: guess up to this many tokens for each request and step, and verify them together (lesson 14); a
            `Speculation` sets more. None, the default, guesses nothing.
        options: passed to `Engine.for_model`: kv_bytes, num_blocks, block_size, kernel, scheduler_config.

    Raises:
        UserError: an option is invalid or cannot work here.
    """
    pool = pool_maker(kv_dtype)
    tiers = tiers_for(model, kv_cache_dir, kv_host_bytes, kv_disk_bytes, kv_always)
    if tiers is not no_tiers and not enable_prefix_caching:
        raise UserError(
            "tiers keep the prefixes of lesson 8's tree, and prefix caching is off; turn it on, or leave out "
            "kv_cache_dir, kv_host_bytes and kv_disk_bytes",
            param="enable_prefix_caching",
        )
    if hasattr(model.config, "num_gdn_layers"):
        refuse_int8(kv_dtype, "a hybrid model's K and V are not compressed yet")
        engine = hybrid(model, backend, cuda_graphs, enable_prefix_caching=enable_prefix_caching, **options)
        engine = with_speculation(engine, speculate)
        tiers(engine)
        return engine
    if cuda_graphs:
        refuse_int8(kv_dtype, "captured steps read K and V in the model's dtype only")
    replays = cuda_graphs is not False and kv_dtype == "auto"
    manager = manager_class(enable_prefix_caching)
    engine = Engine.for_model(with_backend(model, backend), manager=manager, pool=pool, **options)
    engine = with_speculation(engine, speculate)
    tiers(engine)
    if replays:
        engine.runner = captured(engine.runner, engine.scheduler.config.max_num_seqs)
    return engine


def tiers_for(
    model: Qwen3ForCausalLM,
    directory: str | Path | None,
    host_bytes: int | None,
    disk_bytes: int | None,
    always: bool = False,
) -> Callable[[Engine], None]:
    """Return what puts tiers behind an engine's pool. Called before the model's layers are replaced, to hash them."""
    if directory is None and host_bytes is None and disk_bytes is None:
        return no_tiers
    if directory is None and disk_bytes is not None:
        raise UserError(f"kv_disk_bytes is {disk_bytes}, but there is no kv_cache_dir; name a directory")
    from mini_engine.tiers import attach, keys

    config = attach.TierConfig(
        None if directory is None else Path(directory),
        attach.HOST_BYTES if host_bytes is None else host_bytes,
        attach.DISK_BYTES if disk_bytes is None else disk_bytes,
        measure=not always,
    )
    weights, shape = keys.weights_digest(model), keys.config_digest(model.config)

    def put(engine: Engine) -> None:
        pool = getattr(engine.runner.pool, "kv", engine.runner.pool)  # lesson 11 has two pools
        dtype = str(pool.K[0].dtype).removeprefix("torch.")
        identity = keys.Identity(weights, shape, dtype, engine.scheduler.manager.block_size)
        attach.attach_tiers(engine, config, identity)

    return put


def no_tiers(engine: Engine) -> None:
    """Leave the engine without tiers."""


def parallel(
    path_or_hub_id: str | Path,
    num_ranks: int,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    *,
    enable_prefix_caching: bool = True,
    speculate: "int | Speculation | None" = None,
    **options: Any,
) -> Engine:
    """Start other ranks and return the engine of this one, rank 0 (lesson 13). Its runner's `close` ends them.

    Args:
        dtype: as in `load`.
        options: as for `build_engine`; those that ranks cannot share are refused.

    Raises:
        UserError: the checkpoint or an option cannot be shared by so many ranks; the sentence says why.
    """
    from mini_engine.parallel.limits import alone_only, check_device, shareable

    options = shareable(options)
    check_device(device)
    directory = resolve_checkpoint(path_or_hub_id)
    if is_hybrid_at(directory):
        raise alone_only(f"{path_or_hub_id} is a hybrid model", "choose a Qwen3", "model")
    from mini_engine.parallel.build import parallel_engine
    from mini_engine.parallel.ranks import Ranks

    ranks = Ranks(str(directory), num_ranks, as_dtype(dtype, "cpu"))
    try:
        engine = parallel_engine(ranks, manager=manager_class(enable_prefix_caching), **options)
        return with_speculation(engine, speculate)
    except BaseException:
        ranks.close()
        raise


def load(path_or_hub_id: str | Path, dtype: str | torch.dtype, device: str | torch.device) -> Qwen3ForCausalLM:
    """Load a checkpoint.

    Args:
        dtype: a torch dtype or its name; "auto" is float32 on a CPU and bfloat16 on a GPU.
        device: "auto" is the GPU if torch sees one.

    Raises:
        UserError: the checkpoint cannot run here; one sentence says why.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device is 'cuda', but this torch sees no CUDA device; use 'cpu'", param="device")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = as_dtype(dtype, device)
    directory = resolve_checkpoint(path_or_hub_id)
    if is_hybrid_at(directory):
        from mini_engine.hybrid.weights import load_hybrid

        return load_hybrid(directory, dtype, device)
    return load_model(directory, dtype, device)


def as_dtype(dtype: str | torch.dtype, device: str | torch.device) -> torch.dtype:
    """Return the torch dtype that `dtype` names on this device; UserError if there is none."""
    if dtype == "auto":
        return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}; choose one of auto, {', '.join(DTYPES)}", param="dtype")
    return DTYPES[dtype] if isinstance(dtype, str) else dtype


def is_hybrid_at(directory: Path) -> bool:
    """Return whether the directory holds a hybrid model (lesson 11)."""
    from mini_engine.config_schema import is_hybrid  # its library is needed only here

    return is_hybrid(read_json(directory / "config.json"))


def with_backend(model: Qwen3ForCausalLM, backend: str) -> Qwen3ForCausalLM:
    """Return the model with the layers of this backend."""
    if backend not in BACKENDS:
        raise UserError(f"there is no backend {backend!r}; choose one of {', '.join(BACKENDS)}", param="backend")
    if backend == "fused" or (backend == "auto" and model.device.type == "cuda"):
        return with_fused_layers(model, backend)
    if backend == "reference" or (backend == "auto" and model.device.type != "cpu"):
        return model
    from mini_engine.cpu import speed_up

    return speed_up(model, backend)


def with_fused_layers(model: Qwen3ForCausalLM, backend: str) -> Qwen3ForCausalLM:
    """Return the model with lesson 10's layers. If they do not work here, "auto" keeps the model and says so."""
    from mini_engine.gpu.fused_layers import fuse

    try:
        return fuse(model)
    except UserError as why:
        if backend == "fused":
            raise
        sys.stderr.write(f"layers: {why}. Using the reference layers: the same tokens, but more launches per step.\n")
        return model


def manager_class(enable_prefix_caching: bool) -> type[KvCacheManager]:
    """Return lesson 8's manager, or lesson 5's, which does not share prefixes."""
    if not enable_prefix_caching:
        return KvCacheManager
    from mini_engine.kv.prefix_manager import PrefixCacheManager

    return PrefixCacheManager


def pool_maker(kv_dtype: str) -> type[PoolMaker]:
    """Return what makes a pool that stores K and V in this way."""
    if kv_dtype not in KV_DTYPES:
        raise UserError(f"kv_dtype is {kv_dtype!r}; choose one of {', '.join(KV_DTYPES)}", param="kv_dtype")
    if kv_dtype == "auto":
        return PoolMaker
    from mini_engine.int8.build import Int8PoolMaker

    return Int8PoolMaker


def with_speculation(engine: Engine, speculate: "int | Speculation | None") -> Engine:
    """Return lesson 14's engine in place of `engine`, or `engine` itself if nothing is to be guessed."""
    if speculate is None:
        return engine
    from mini_engine.speculation.config import Speculation
    from mini_engine.speculation.engine import speculating

    return speculating(engine, Speculation.of(speculate))


def refuse_int8(kv_dtype: str, why: str) -> None:
    """Raise UserError if K and V are to be compressed where that cannot work."""
    if kv_dtype == "int8":
        raise UserError(f"kv_dtype is 'int8', but {why}; leave it out", param="kv_dtype")


def hybrid(model: Qwen3ForCausalLM, backend: str, cuda_graphs: bool | None, **options: Any) -> Engine:
    """Return lesson 11's engine, with the fastest parts that work here."""
    from mini_engine.hybrid.build import hybrid_engine
    from mini_engine.hybrid.model import HybridForCausalLM

    assert isinstance(model, HybridForCausalLM)
    if backend not in BACKENDS:
        raise UserError(f"there is no backend {backend!r}; choose one of {', '.join(BACKENDS)}", param="backend")
    step = None
    if backend != "reference" and not (backend == "auto" and model.device.type != "cpu"):
        from mini_engine.hybrid.fast import native_step_for, speed_up_hybrid

        model = speed_up_hybrid(model, backend)
        step = native_step_for(model)
    engine = hybrid_engine(model, native_step=step, **options)
    if cuda_graphs is not False and model.device.type == "cuda":
        from mini_engine.hybrid.graphs import captured

        engine.runner = captured(engine.runner, engine.scheduler.config.max_num_seqs)
    return engine


def captured(runner: ModelRunner, max_num_seqs: int) -> ModelRunner:
    """Return lesson 10's runner in place of `runner` if device and kernel allow it, otherwise lesson 5's."""
    if runner.pool.device.type != "cuda":
        return runner
    from mini_engine.gpu.graphs import runner_for

    return runner_for(runner.model, runner.pool, max_num_seqs)
