"""Lesson 0. Changes of a checkpoint's files."""

import json
import shutil
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


def rewritten(
    source: Path,
    directory: Path,
    tensors: Callable[[dict], dict] = lambda found: found,
    config: Callable[[dict], dict] = lambda found: found,
) -> Path:
    """Copy a checkpoint of one file or of shards to one file, with its tensors and its config.json changed."""
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    path = directory / "config.json"
    path.write_text(json.dumps(config(json.loads(path.read_text(encoding="utf-8")))), encoding="utf-8")
    found = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    save_file({name: tensor.clone() for name, tensor in tensors(found).items()}, directory / "model.safetensors")
    return directory


def sharded(directory: Path, wrong_shard: str = "") -> Path:
    """Divide a checkpoint into two shards and an index. `wrong_shard`: a tensor that the index places wrongly."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    shards = {"a.safetensors": sorted(tensors)[::2], "b.safetensors": sorted(tensors)[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, directory / file)
    places = {name: file for file, held in shards.items() for name in held}
    if wrong_shard:
        places[wrong_shard] = next(file for file in shards if file != places[wrong_shard])
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8"
    )
    return directory


def edit_tensors(directory: Path, change: Callable[[dict], dict | None]) -> Path:
    """Change the tensors: in place, or for those that `change` returns."""
    tensors = load_file(directory / "model.safetensors")
    changed = change(tensors)
    tensors = changed if isinstance(changed, dict) else tensors
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory
