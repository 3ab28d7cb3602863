"""Course machinery. Loads any checkpoint of the course: its config.json names the family that reads it."""

from pathlib import Path

import torch

from mini_engine.base.errors import UserError
from mini_engine.base.values import shown
from mini_engine.checkpoint.config import DTYPES
from mini_engine.checkpoint.directory import resolve_checkpoint
from mini_engine.checkpoint.json_files import read_json
from mini_engine.families import family_of
from mini_engine.families.family import Family
from mini_engine.model.causal_lm import CausalLM


def load(path_or_hub_id: str | Path, dtype: str | torch.dtype, device: str | torch.device) -> CausalLM:
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
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise UserError(f"device is {shown(device)}; choose one of auto, cpu, cuda", param="device") from None
    dtype = as_dtype(dtype, device)
    directory = resolve_checkpoint(path_or_hub_id)
    return reader_of(directory).load(directory, dtype, device)


def reader_of(directory: Path) -> Family:
    """Return the family that reads a checkpoint. UserError: its config.json is of none that run here."""
    path = directory / "config.json"
    return family_of(read_json(path), path)


def as_dtype(dtype: str | torch.dtype, device: str | torch.device) -> torch.dtype:
    """Return the torch dtype that `dtype` names on this device; UserError if there is none."""
    if dtype == "auto":
        return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise UserError(f"dtype is {shown(dtype)}; choose one of auto, {', '.join(DTYPES)}", param="dtype")
    return DTYPES[dtype] if isinstance(dtype, str) else dtype
