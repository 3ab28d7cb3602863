"""Lesson 0. Finds the directory of a checkpoint: by a shipped model's name, a path or a hub id."""

import re
from collections.abc import Sequence
from pathlib import Path

from mini_engine.base.errors import UserError, first_line
from mini_engine.base.values import shown
from mini_engine.checkpoint.shipped import SHIPPED, shipped_checkpoint

GGUF = "of GGUF this engine reads nothing: fetch the checkpoint it was made from, with config.json and safetensors"
MOST_SHOWN = 200  # characters of a name in a message
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "merges.txt", "vocab.json")


def resolve_checkpoint(path_or_hub_id: str | Path, files: Sequence[str] = HUB_FILES) -> Path:
    """Return the local directory of a checkpoint: of a shipped model's name, a path, or a hub id, downloaded first.

    files: patterns of the names to download.
    """
    if not isinstance(path_or_hub_id, str | Path) or path_or_hub_id == "":  # Path("") is the working directory
        raise UserError(f"the model is {shown(path_or_hub_id)}; give a checkpoint directory or a hub id", param="model")
    path, name = Path(path_or_hub_id), str(path_or_hub_id)
    name = name if len(name) <= MOST_SHOWN else f"{name[:MOST_SHOWN]}…"
    try:
        if name in SHIPPED and not path.exists():
            return shipped_checkpoint(name)
        if path.is_dir():
            return path
        exists = path.exists()
    except (OSError, ValueError) as error:  # too long, for example
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{name} cannot be a directory ({why}); give a checkpoint directory") from None
    if exists:
        what = GGUF if path.suffix == ".gguf" else "give the directory that holds config.json and the safetensors"
        raise UserError(f"{name} is a file; {what}")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(path_or_hub_id)):
        raise UserError(f"there is no directory {name}; give a checkpoint directory or a hub id (owner/name)")
    return _download(str(path_or_hub_id), files)


def _download(hub_id: str, files: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(files)))
    except Exception as error:  # the hub client raises a dozen types; all mean that the download failed
        raise UserError(
            f"{hub_id} is not a directory here, and downloading it from the hub failed ({first_line(error)}); "
            "without a network, give a checkpoint directory or use the shipped pocket model"
        ) from error
