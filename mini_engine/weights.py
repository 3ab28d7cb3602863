"""Lesson 0. Loads a model from a checkpoint directory or a hub id.

Tensors are copied from the mapped file straight to their destination. The file is mapped again for every piece, so that
pages already copied are released: peak memory is the model's own size plus one piece, not twice the model.
"""

import re
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mini_engine.config import Qwen3Config, read_json
from mini_engine.errors import UserError
from mini_engine.model.qwen3 import Qwen3ForCausalLM

PIECE_BYTES = 16 * 2**20
INDEX_NAME = "model.safetensors.index.json"
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "merges.txt", "vocab.json"]


def load_model(
    path_or_hub_id: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Qwen3ForCausalLM:
    """Load a dense Qwen3 checkpoint, ready for inference.

    Args:
        path_or_hub_id: a directory with config.json and safetensors (one file or shards), or a hub id such as
            "Qwen/Qwen3-0.6B", which huggingface_hub downloads once and keeps.
        dtype: dtype of the loaded weights; a checkpoint of another dtype is converted piece by piece.

    Raises:
        UserError: the checkpoint, the dtype or the device cannot be used; the message says why.
    """
    _check_place(dtype, device)
    directory = resolve_checkpoint(path_or_hub_id)
    config = Qwen3Config.from_dir(directory)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    sources = _find_tensors(directory)
    _check_tensors(directory, model, sources)
    weights = {name: torch.empty(p.shape, dtype=dtype, device=device) for name, p in model.named_parameters()}
    for name, weight in weights.items():
        _copy_into(weight, sources[name], name)
    model.load_state_dict(weights, assign=True)
    return model.eval().requires_grad_(False)


def _check_place(dtype: torch.dtype, device: str | torch.device) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UserError(f"dtype is {dtype!r}; give torch.float32, torch.bfloat16 or torch.float16")
    try:
        torch.empty(1, device=device)
    except (AssertionError, RuntimeError, TypeError) as error:  # torch has a type for each way to lack a device
        why = _first_line(error)
        raise UserError(f"device {device!r} cannot be used on this machine ({why}); give 'cpu'") from error


def resolve_checkpoint(path_or_hub_id: str | Path) -> Path:
    """Return the local directory of a checkpoint; a hub id is downloaded first."""
    path = Path(path_or_hub_id)
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{path} is a file; give the directory that holds config.json and the safetensors")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(path_or_hub_id)):
        raise UserError(f"there is no directory {path_or_hub_id}; give a checkpoint directory or a hub id (owner/name)")
    return _download(str(path_or_hub_id))


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES))
    except Exception as error:  # the hub client raises a dozen types; all mean that the download failed
        raise UserError(
            f"{hub_id} is not a directory here, and downloading it from the hub failed ({_first_line(error)}); "
            "without a network, give a checkpoint directory or use the shipped pocket model"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


@contextmanager
def _open(path: Path):
    """Open a safetensors file; whatever it raises becomes a UserError."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise UserError(f"{path} does not exist, though the checkpoint names it; download it again") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a valid safetensors file ({_first_line(error)}); download it again") from error


def _find_tensors(directory: Path) -> dict[str, Path]:
    """Map each tensor's name to its file: from the index of a sharded checkpoint, or from the single file's header."""
    if (directory / INDEX_NAME).is_file():
        weight_map = read_json(directory / INDEX_NAME).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UserError(f"{directory / INDEX_NAME} has no weight_map, so its shards cannot be found")
        missing = sorted({file for file in weight_map.values() if not (directory / file).is_file()})
        if missing:
            raise UserError(f"{directory / INDEX_NAME} names {_some(missing)}, which is not in {directory}")
        return {name: directory / file for name, file in weight_map.items()}
    path = directory / "model.safetensors"
    if not path.is_file():
        raise UserError(f"{directory} holds neither model.safetensors nor {INDEX_NAME}")
    with _open(path) as file:
        return dict.fromkeys(file.keys(), path)


def _check_tensors(directory: Path, model: Qwen3ForCausalLM, sources: dict[str, Path]) -> None:
    """Check that the files hold every tensor of the model, in its shape, and no others, before any byte is copied."""
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    spare = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    if missing := [name for name in wanted if name not in sources]:
        raise UserError(f"{directory} lacks {_some(missing)}; its config.json describes another model")
    if extra := sorted(name for name in sources if name not in wanted and name not in spare):
        raise UserError(f"{directory} also holds {_some(extra)}, which a Qwen3 of this config does not have")
    shapes = {}
    for path in dict.fromkeys(sources.values()):
        with _open(path) as file:
            here = [name for name in file.keys() if sources.get(name) == path]
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in here}
    if astray := [name for name in wanted if name not in shapes]:
        raise UserError(f"{directory / INDEX_NAME} lists {_some(astray)}, but the shard does not contain it")
    if bent := [f"{n} {list(shapes[n])}, not {list(wanted[n])}" for n in wanted if shapes[n] != wanted[n]]:
        raise UserError(f"{directory} has the wrong shape for {_some(bent)}")


def _some(names: Iterable[str], limit: int = 3) -> str:
    """Join the first few of `names` and say how many more there are."""
    names = list(names)
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def _copy_into(target: Tensor, path: Path, name: str) -> None:
    """Copy one tensor in pieces of rows, mapping the file again for each piece."""
    row_bytes = max(1, target[:1].nbytes)
    rows = max(1, PIECE_BYTES // row_bytes)
    for start in range(0, len(target), rows):
        with _open(path) as file:
            target[start : start + rows].copy_(file.get_slice(name)[start : start + rows])
