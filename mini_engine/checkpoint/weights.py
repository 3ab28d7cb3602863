"""Lesson 0. Loads a model from a checkpoint directory or a hub id."""

import re
from pathlib import Path

import torch

from mini_engine.base.errors import UserError, first_line
from mini_engine.base.values import shown
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.checkpoint.shipped import FOLDERS, shipped_checkpoint
from mini_engine.checkpoint.stored import Stored
from mini_engine.model.causal_lm import CausalLM
from mini_engine.model.qwen3 import qwen3_model

HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "merges.txt", "vocab.json"]


def load_model(
    path_or_hub_id: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> CausalLM:
    """Load a dense Qwen3 checkpoint, ready for inference.

    Args:
        path_or_hub_id: a directory with config.json and safetensors (one file or shards), or a hub id such as
            "Qwen/Qwen3-0.6B", which huggingface_hub downloads once and keeps.
        dtype: dtype of the loaded weights; a checkpoint of another dtype is converted piece by piece.

    Raises:
        UserError: the checkpoint, the dtype or the device cannot be used; the message says why.
    """
    check_place(dtype, device)
    return stored_model(resolve_checkpoint(path_or_hub_id)).load(dtype, device)


def stored_model(directory: Path) -> Stored:
    """Return the checked tensors of a dense Qwen3 checkpoint. UserError: the checkpoint cannot be used."""
    return Stored(qwen3_model, Qwen3Config.from_dir(directory), directory)


def check_place(dtype: torch.dtype, device: str | torch.device) -> None:
    """Raise UserError unless weights of this dtype can lie on this device."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UserError(f"dtype is {shown(dtype)}; give torch.float32, torch.bfloat16 or torch.float16", param="dtype")
    try:
        torch.empty(1, device=device)
    except (AssertionError, RuntimeError, TypeError) as error:  # torch raises each of them for some missing device
        why = first_line(error)
        raise UserError(
            f"device {str(device)!r} cannot be used on this machine ({why}); give 'cpu'", param="device"
        ) from error


def resolve_checkpoint(path_or_hub_id: str | Path) -> Path:
    """Return the local directory of a checkpoint: of a shipped model's name, a path, or a hub id, downloaded first."""
    if not isinstance(path_or_hub_id, str | Path) or path_or_hub_id == "":  # Path("") is the working directory
        raise UserError(f"the model is {shown(path_or_hub_id)}; give a checkpoint directory or a hub id", param="model")
    path, name = Path(path_or_hub_id), _shortened(str(path_or_hub_id))
    try:
        if name in FOLDERS and not path.exists():
            return shipped_checkpoint(name)
        if path.is_dir():
            return path
        exists = path.exists()
    except (OSError, ValueError) as error:  # too long, for example
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{name} cannot be a directory ({why}); give a checkpoint directory") from None
    if exists:
        raise UserError(f"{name} is a file; give the directory that holds config.json and the safetensors")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(path_or_hub_id)):
        raise UserError(f"there is no directory {name}; give a checkpoint directory or a hub id (owner/name)")
    return _download(str(path_or_hub_id))


def _shortened(name: str, most: int = 200) -> str:
    return name if len(name) <= most else f"{name[:most]}…"


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES))
    except Exception as error:  # the hub client raises a dozen types; all mean that the download failed
        raise UserError(
            f"{hub_id} is not a directory here, and downloading it from the hub failed ({first_line(error)}); "
            "without a network, give a checkpoint directory or use the shipped pocket model"
        ) from error
