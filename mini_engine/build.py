"""Course machinery. The composition root: a checkpoint and options in, an engine out.

Only this module knows which backends, managers and runners the lessons have added. Each is imported when it is chosen,
so an engine without lesson 9's layers or lesson 8's tree does not need their files.
"""

from pathlib import Path
from typing import Any

import torch

from mini_engine.config import DTYPES
from mini_engine.engine.engine import Engine
from mini_engine.engine.runner import ModelRunner
from mini_engine.errors import UserError
from mini_engine.kv.manager import KvCacheManager
from mini_engine.model.qwen3 import Qwen3ForCausalLM
from mini_engine.weights import load_model

BACKENDS = ("auto", "packed", "torch", "reference")


def build_engine(
    model: Qwen3ForCausalLM,
    *,
    backend: str = "auto",
    cuda_graphs: bool = False,
    enable_prefix_caching: bool = True,
    **options: Any,
) -> Engine:
    """Return an engine for a loaded model, with the fastest parts that work here.

    Args:
        backend: which code runs the layers on a CPU: "packed" or "torch" (lesson 9), "auto", the first of these that
            works, or "reference" (lesson 0's own layers). On a GPU "auto" and "reference" are the same.
        cuda_graphs: replay captured decode steps (lesson 10) if device and kernel allow it.
        enable_prefix_caching: share prefixes between requests (lesson 8).
        options: passed to `Engine.for_model`: kv_bytes, num_blocks, block_size, kernel, scheduler_config.

    Raises:
        UserError: an option is invalid or cannot work here.
    """
    engine = Engine.for_model(with_backend(model, backend), manager=manager_class(enable_prefix_caching), **options)
    if cuda_graphs:
        engine.runner = captured(engine.runner, engine.scheduler.config.max_num_seqs)
    return engine


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
    if dtype == "auto":
        dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise UserError(f"dtype is {dtype!r}; choose one of auto, {', '.join(DTYPES)}", param="dtype")
        dtype = DTYPES[dtype]
    return load_model(path_or_hub_id, dtype, device)


def with_backend(model: Qwen3ForCausalLM, backend: str) -> Qwen3ForCausalLM:
    """Return the model with the layers of this backend."""
    if backend not in BACKENDS:
        raise UserError(f"there is no backend {backend!r}; choose one of {', '.join(BACKENDS)}", param="backend")
    if backend == "reference" or (backend == "auto" and model.device.type != "cpu"):
        return model
    from mini_engine.cpu import speed_up

    return speed_up(model, backend)


def manager_class(enable_prefix_caching: bool) -> type[KvCacheManager]:
    """Return lesson 8's manager, or lesson 5's, which does not share prefixes."""
    if not enable_prefix_caching:
        return KvCacheManager
    from mini_engine.kv.prefix_manager import PrefixCacheManager

    return PrefixCacheManager


def captured(runner: ModelRunner, max_num_seqs: int) -> ModelRunner:
    """Return lesson 10's runner in place of `runner` if device and kernel allow it, otherwise lesson 5's."""
    from mini_engine.gpu.graphs import runner_for

    return runner_for(runner.model, runner.pool, max_num_seqs)
