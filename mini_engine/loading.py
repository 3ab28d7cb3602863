"""Course machinery. Loads any checkpoint of the course, of lesson 0, 11 (hybrids), 15 (windows) or 16 (latents)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mini_engine.checkpoint.config import DTYPES, Qwen3Config
from mini_engine.checkpoint.json_files import read_json
from mini_engine.checkpoint.stored import Stored
from mini_engine.checkpoint.weights import load_model, resolve_checkpoint, stored_model
from mini_engine.errors import UserError
from mini_engine.model.qwen3 import Qwen3ForCausalLM
from mini_engine.values import shown


class Reader(NamedTuple):
    """The functions that read one kind of checkpoint.

    shape: returns its config. load: returns the model, ready for inference. stored: returns its checked tensors, of
    which a rank loads a part.
    """

    shape: Callable[[Path], Any]
    load: Callable[..., Any]
    stored: Callable[[Path], Stored[Any]]


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
    return reader_of(directory).load(directory, dtype, device)


def reader_of(directory: Path) -> Reader:
    """Return the reader for a checkpoint: lesson 0's, 11's, 15's or 16's."""
    from mini_engine.checkpoint.config_schema import (
        has_latents,
        has_windows,
        is_hybrid,
    )  # its library is needed only here

    raw = read_json(directory / "config.json")
    if is_hybrid(raw):
        from mini_engine.hybrid.hybrid_config import HybridConfig
        from mini_engine.hybrid.weights import load_hybrid, stored_hybrid

        return Reader(HybridConfig.from_dir, load_hybrid, stored_hybrid)
    if has_windows(raw):
        from mini_engine.windows.weights import load_windowed, stored_windowed
        from mini_engine.windows.window_config import WindowConfig

        return Reader(WindowConfig.from_dir, load_windowed, stored_windowed)
    if has_latents(raw):
        from mini_engine.latents.latent_config import LatentConfig
        from mini_engine.latents.weights import load_latents, stored_latents

        return Reader(LatentConfig.from_dir, load_latents, stored_latents)
    return Reader(Qwen3Config.from_dir, load_model, stored_model)


def check_kind(path_or_hub_id: str | Path) -> None:
    """Raise UserError unless a checkpoint's config.json describes a model that runs here. No tensor is read."""
    directory = resolve_checkpoint(path_or_hub_id)
    reader_of(directory).shape(directory)


def as_device(device: str | torch.device) -> torch.device:
    """Return the device with this name; UserError if torch has no such device."""
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
