"""Lesson 0. Changes of a checkpoint's files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

GONE = "gone"


def edit_config(directory: Path, **changes: Any) -> Path:
    """Change config.json; GONE takes a name away."""
    path = directory / "config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) | changes
    kept = {name: value for name, value in settings.items() if value != GONE}
    path.write_text(json.dumps(kept), encoding="utf-8")
    return directory


def edit_tensors(directory: Path, change: Callable[[dict], dict | None]) -> Path:
    """Change the tensors: in place, or for those that `change` returns."""
    tensors = load_file(directory / "model.safetensors")
    changed = change(tensors)
    tensors = changed if isinstance(changed, dict) else tensors
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory
