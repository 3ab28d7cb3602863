"""Course machinery. Loads any checkpoint of the course: a Qwen3 (lesson 0) or a hybrid (lesson 11)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mini_engine.checkpoint.config import DTYPES, Qwen3Config, read_json
from mini_engine.checkpoint.weights import load_model, resolve_checkpoint
from mini_engine.errors import UserError
from mini_engine.model.qwen3 import Qwen3ForCausalLM
from mini_engine.values import shown


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
    device = as_device(device)
    dtype = as_dtype(dtype, device)
    directory = resolve_checkpoint(path_or_hub_id)
    return reader_of(directory)[1](directory, dtype, device)


def reader_of(directory: Path) -> tuple[Callable[[Path], Any], Callable[..., Any]]:
    """Return what reads the shape of a checkpoint, and what loads it: lesson 0's, or lesson 11's for a hybrid."""
    if is_hybrid_at(directory):
        from mini_engine.hybrid.hybrid_config import HybridConfig
        from mini_engine.hybrid.weights import load_hybrid

        return HybridConfig.from_dir, load_hybrid
    return Qwen3Config.from_dir, load_model


def as_device(device: str | torch.device) -> torch.device:
    """Return the device with this name; UserError if torch knows none."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise UserError(f"device is {shown(device)}; choose one of auto, cpu, cuda", param="device") from None


def as_dtype(dtype: str | torch.dtype, device: str | torch.device) -> torch.dtype:
    """Return the torch dtype that `dtype` names on this device; UserError if there is none."""
    if dtype == "auto":
        return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise UserError(f"dtype is {shown(dtype)}; choose one of auto, {', '.join(DTYPES)}", param="dtype")
    return DTYPES[dtype] if isinstance(dtype, str) else dtype


def is_hybrid_at(directory: Path) -> bool:
    """Return whether the directory holds a hybrid model (lesson 11)."""
    from mini_engine.checkpoint.config_schema import is_hybrid  # its library is needed only here

    return is_hybrid(read_json(directory / "config.json"))
