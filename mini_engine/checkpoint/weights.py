"""Lesson 0. Loads a model from a checkpoint directory or a hub id.

Tensors are copied from the mapped file straight to their destination. The file is mapped again for every piece, so that
pages already copied are released: peak memory is the model's own size plus one piece, not twice the model.
"""

import re
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mini_engine.checkpoint.config import Qwen3Config, read_json
from mini_engine.errors import UserError, first_line, warn_once
from mini_engine.model.qwen3 import Qwen3ForCausalLM
from mini_engine.values import shown

PIECE_BYTES = 16 * 2**20
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FILE_DTYPES = ("F64", "F32", "F16", "BF16")
SHIPPED = {"pocket": "pocket", "pocket-hybrid": "pocket_hybrid"}  # name: folder beside this file
INDEX_NAME = "model.safetensors.index.json"
Model = TypeVar("Model", bound=Qwen3ForCausalLM)
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
    check_place(dtype, device)
    directory = resolve_checkpoint(path_or_hub_id)
    return read_into(Qwen3ForCausalLM, Qwen3Config.from_dir(directory), directory, dtype, device)


def read_into(
    kind: Callable[[Any], Model],
    config: Qwen3Config,
    directory: Path,
    dtype: torch.dtype,
    device: str | torch.device,
    ignored: tuple[str, ...] = (),
) -> Model:
    """Build a model and read its weights from a checkpoint directory. Tensors with a prefix in `ignored` are left out.

    Raises:
        UserError: the files do not hold this model; the message says why.
    """
    sources = {name: path for name, path in _find_tensors(directory).items() if not name.startswith(ignored)}
    _check_layers(directory, config, sources)
    config = _without_false_tie(directory, config, sources)
    with torch.device("meta"):
        model = kind(config)
    _check_tensors(directory, model, sources)
    weights = {name: torch.empty(p.shape, dtype=dtype, device=device) for name, p in model.named_parameters()}
    for name, weight in weights.items():
        _copy_into(weight, sources[name], name)
    model.load_state_dict(weights, assign=True)
    return model.to(device).eval().requires_grad_(False)  # `to` moves what no file holds: RoPE's frequencies


def check_place(dtype: torch.dtype, device: str | torch.device) -> None:
    """Raise UserError unless weights of this dtype can lie on this device."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UserError(f"dtype is {shown(dtype)}; give torch.float32, torch.bfloat16 or torch.float16", param="dtype")
    try:
        torch.empty(1, device=device)
    except (AssertionError, RuntimeError, TypeError) as error:  # torch has a type for each way to lack a device
        why = first_line(error)
        raise UserError(
            f"device {str(device)!r} cannot be used on this machine ({why}); give 'cpu'", param="device"
        ) from error


def resolve_checkpoint(path_or_hub_id: str | Path) -> Path:
    """Return the local directory of a checkpoint; a hub id is downloaded first, the shipped models have short names."""
    if not isinstance(path_or_hub_id, str | Path):
        raise UserError(f"the model is {shown(path_or_hub_id)}; give a checkpoint directory or a hub id", param="model")
    path, name = Path(path_or_hub_id), _shortened(str(path_or_hub_id))
    try:
        if name in SHIPPED and not path.exists():
            return Path(__file__).parents[1] / SHIPPED[name]
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


@contextmanager
def _open(path: Path):
    """Open a safetensors file; whatever it raises becomes a UserError."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise UserError(f"{path} does not exist, though the checkpoint names it; download it again") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a valid safetensors file ({first_line(error)}); download it again") from error


def _find_tensors(directory: Path) -> dict[str, Path]:
    """Map each tensor's name to its file: from the header of a single file or, where there is none, from the index."""
    path, index = directory / "model.safetensors", directory / INDEX_NAME
    if path.is_file():
        with _open(path) as file:
            return dict.fromkeys(file.keys(), path)
    if not index.is_file():
        raise UserError(f"{directory} holds neither model.safetensors nor {INDEX_NAME}")
    from mini_engine.checkpoint.config_schema import read_weight_map  # its library is needed only here

    files = read_weight_map(read_json(index), index)
    if missing := sorted(file for file in set(files.values()) if not (directory / file).is_file()):
        raise UserError(f"{index} names {_some(missing)}, which is not in {directory}")
    return {name: directory / file for name, file in files.items()}


def _check_layers(directory: Path, config: Qwen3Config, sources: Iterable[str]) -> None:
    """Check that the files hold as many layers as config.json asks for, before a model of that depth is built."""
    held = {found[1] for found in (re.match(r"model\.layers\.(\d+)\.", name) for name in sources) if found}
    if config.num_hidden_layers > len(held):
        raise UserError(
            f"{directory / 'config.json'} has num_hidden_layers = {config.num_hidden_layers}, "
            f"but the safetensors hold {len(held)} layers"
        )


def _without_false_tie(directory: Path, config: Qwen3Config, sources: dict[str, Path]) -> Qwen3Config:
    """Return the config with an untied head if the files hold a head that differs from the embedding.

    transformers trusts the files too, with a warning. A head that equals the embedding is tied, as config.json says.
    """
    if not config.tie_word_embeddings or HEAD not in sources or EMBEDDING not in sources:
        return config
    with _open(sources[HEAD]) as one, _open(sources[EMBEDDING]) as other:
        if _equal(one.get_slice(HEAD), other.get_slice(EMBEDDING)):
            return config
    warn_once(
        f"{directory} has a head that differs from its embedding, so tie_word_embeddings in config.json is ignored"
    )
    return replace(config, tie_word_embeddings=False)


def _equal(one: Any, other: Any) -> bool:
    """Compare two slices of safetensors files, a piece of rows at a time."""
    if one.get_shape() != other.get_shape() or len(one.get_shape()) != 2:
        return False
    rows, columns = one.get_shape()
    step = max(1, PIECE_BYTES // (8 * columns))
    return all(torch.equal(one[at : at + step], other[at : at + step]) for at in range(0, rows, step))


def _check_tensors(directory: Path, model: Qwen3ForCausalLM, sources: dict[str, Path]) -> None:
    """Check that the files hold every tensor of the model, in its shape, and no others, before any byte is copied."""
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    spare = {HEAD} if model.config.tie_word_embeddings else set()
    if missing := [name for name in wanted if name not in sources]:
        raise UserError(f"{directory} lacks {_some(missing)}; its config.json describes another model")
    if extra := sorted(name for name in sources if name not in wanted and name not in spare):
        raise UserError(f"{directory} also holds {_some(extra)}, which a model of this config does not have")
    shapes, dtypes = {}, {}
    for path in dict.fromkeys(sources.values()):
        with _open(path) as file:
            for name in [name for name in file.keys() if sources.get(name) == path]:
                header = file.get_slice(name)
                shapes[name], dtypes[name] = tuple(header.get_shape()), header.get_dtype()
    if missing_tensors := [name for name in wanted if name not in shapes]:
        raise UserError(f"{directory / INDEX_NAME} lists {_some(missing_tensors)}, but the shard does not contain it")
    if wrong_shape := [f"{n} {list(shapes[n])}, not {list(wanted[n])}" for n in wanted if shapes[n] != wanted[n]]:
        raise UserError(f"{directory} has the wrong shape for {_some(wrong_shape)}")
    if wrong_dtype := [f"{n} of type {dtypes[n]}" for n in wanted if dtypes[n] not in FILE_DTYPES]:
        raise UserError(f"{directory} holds {_some(wrong_dtype)}; this engine loads {', '.join(FILE_DTYPES)}")


def _some(names: Iterable[str], limit: int = 3) -> str:
    """Join the first few of `names` and say how many more there are."""
    names = list(names)
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def _copy_into(target: Tensor, path: Path, name: str) -> None:
    """Copy one tensor in pieces of rows, mapping the file again for each piece; refuse NaN and Inf.

    The scan is one sum: NaN and Inf survive addition. Only a sum that is not finite, which large weights may also have,
    is looked at closely.
    """
    row_bytes = max(1, target[:1].nbytes)
    rows = max(1, PIECE_BYTES // row_bytes)
    total = torch.zeros((), device=target.device)
    for start in range(0, len(target), rows):
        with _open(path) as file:
            piece = target[start : start + rows].copy_(file.get_slice(name)[start : start + rows])
        total += piece.sum()  # in the piece's own dtype: on a CPU bfloat16 is ten times slower otherwise
    if not total.isfinite() and not target.isfinite().all():
        raise UserError(
            f"{path} has NaN or Inf in {name} as {target.dtype}; the checkpoint is damaged, or needs float32"
        )
