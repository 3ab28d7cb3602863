"""Lesson 0. The tensors of a checkpoint directory: found, checked, and read in pieces.

Tensors are copied from the mapped file straight to their destination. The file is mapped again for every piece, so that
pages already copied are released: peak memory is the model's own size plus one piece, not twice the model.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mini_engine.base.errors import UserError, warn_once
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.checkpoint.directory import GGUF
from mini_engine.checkpoint.json_files import read_json
from mini_engine.checkpoint.names import EMBEDDING, HEAD, Place, Stack, parts_of, place_parameters, unknown
from mini_engine.checkpoint.tensor_files import headers_of, open_file, read_rows

PIECE_BYTES = 16 * 2**20
FILE_DTYPES = ("F64", "F32", "F16", "BF16")
INDEX_NAME = "model.safetensors.index.json"


class Part(NamedTuple):
    """The part of a stored tensor that a process loads.

    rows: ranges of rows, loaded one after the other. columns: of each of these rows; None: all of them.
    """

    rows: Sequence[range]
    columns: range | None = None


class Cut:
    """Selects the part of a checkpoint that a process loads: this one everything. A rank's selects its share."""

    def build(self, kind: Callable[[Any], Any], config: Any) -> Any:
        """Return this process's model, without weights. Its parameters have the names of the whole, `kind(config)`."""
        return kind(config)

    def part_of(self, name: str, shape: Sequence[int], config: Any) -> Part:
        """Return the part to load of the stored tensor `name` of this shape. The parameter's further rows are zero."""
        return Part([range(shape[0])])


WHOLE = Cut()


class Stored:
    """A checkpoint directory. All of its tensors have been checked; none has been read.

    Args:
        kind: creates the model. config: its shape.
        renamed: maps a family's own stored names to those of most checkpoints.
        ignored: tensors with these prefixes are skipped silently; any other that the model lacks gets a warning.
        in_float32: parameters whose names end so are loaded in float32, whatever the model's dtype is.

    Attributes:
        config: its head is untied if the files hold a head that differs from the embedding.
        places: the location of each parameter, by its name in the model.
        shapes: of each parameter of the whole model, by name.

    Raises:
        UserError: the files do not hold this model; the message says why.
    """

    def __init__(
        self,
        kind: Callable[[Any], Any],
        config: Qwen3Config,
        directory: Path,
        renamed: Callable[[str], str] = str,
        ignored: tuple[str, ...] = (),
        in_float32: tuple[str, ...] = (),
    ) -> None:
        self.kind, self.in_float32 = kind, in_float32
        found = _find_tensors(directory)
        _check_layers(directory, config, found)
        self.places = place_parameters(found, config.tie_word_embeddings, renamed)
        self.config = _without_false_tie(directory, config, self.places)
        with torch.device("meta"):
            whole = kind(self.config)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in whole.named_parameters()}
        _check_tensors(directory, self.shapes, self.places)
        used = [place for name, place in self.places.items() if name in self.shapes or name == HEAD]
        known = [part.name for place in used for part in parts_of(place)]
        if extra := unknown(found, known, ignored):
            warn_once(f"{directory} also holds {_some(extra)}, which this model does not have; ignored")

    def load(self, dtype: torch.dtype, device: str | torch.device = "cpu", cut: Cut = WHOLE) -> Any:
        """Return the model with its weights, or with the parts of them that `cut` selects, ready for inference.

        Raises:
            UserError: a weight is NaN or Inf.
        """
        with torch.device("meta"):
            model = cut.build(self.kind, self.config)
        weights = {
            name: torch.empty(parameter.shape, dtype=self.dtype_of(name, dtype), device=device)
            for name, parameter in model.named_parameters()
        }
        for name, weight in weights.items():
            self._copy_into(weight, name, cut.part_of(name, self.shapes[name], self.config))
        model.load_state_dict(weights, assign=True)
        return model.to(device).eval().requires_grad_(False)  # `to` moves RoPE's frequencies, which no file holds

    def pieces(self, name: str, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the parameter `name` of a model of this dtype, some rows at a time."""
        dtype = self.dtype_of(name, dtype)
        for rows in self._divided([range(self.shapes[name][0])], name, dtype):
            yield read_rows(self.places[name], rows).to(dtype)

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of a parameter in a model of this dtype."""
        return torch.float32 if name.endswith(self.in_float32) else dtype

    def _divided(self, rows: Iterable[range], name: str, dtype: torch.dtype) -> Iterator[range]:
        """Divide ranges of rows into pieces of at most PIECE_BYTES, or one row if that is larger."""
        step = max(1, PIECE_BYTES // (math.prod(self.shapes[name][1:]) * dtype.itemsize))
        for each in rows:
            yield from (each[at : at + step] for at in range(0, len(each), step))

    def _copy_into(self, target: Tensor, name: str, part: Part) -> None:
        """Copy a part of one tensor piece by piece, and zero the rows of `target` after it; refuse NaN and Inf.

        The check is one sum, since NaN and Inf survive addition. Only if the sum is not finite, which large weights can
        also cause, are all elements checked.
        """
        at, total = 0, torch.zeros((), device=target.device)
        for rows in self._divided(part.rows, name, target.dtype):
            piece = target[at : at + len(rows)].copy_(read_rows(self.places[name], rows, part.columns))
            total += piece.sum()  # in the piece's own dtype: on a CPU bfloat16 is ten times slower otherwise
            at += len(rows)
        target[at:].zero_()
        if not total.isfinite() and not target.isfinite().all():
            raise UserError(
                f"{self.places[name].path} has NaN or Inf in {name} as {target.dtype}; "
                "the checkpoint is damaged, or needs float32"
            )


def _find_tensors(directory: Path) -> dict[str, Path]:
    """Map each stored tensor to its file: the single one or, where there is none, those that the index names.

    Names are read from the files themselves, as in transformers; the index only lists the files.
    """
    path, index = directory / "model.safetensors", directory / INDEX_NAME
    if path.is_file():
        files = [path.name]
    elif not index.is_file():
        instead = f"; {GGUF}" if any(directory.glob("*.gguf")) else ""
        raise UserError(f"{directory} holds neither model.safetensors nor {INDEX_NAME}{instead}")
    else:
        from mini_engine.checkpoint.config_schema import read_weight_map  # its library is needed only here

        files = sorted(set(read_weight_map(read_json(index), index).values()))
    if missing := [file for file in files if not (directory / file).is_file()]:
        raise UserError(f"{index} names {_some(missing)}, which is not in {directory}")
    found: dict[str, Path] = {}
    for each in files:
        with open_file(directory / each) as file:
            found |= dict.fromkeys(file.keys(), directory / each)
    return found


def _check_layers(directory: Path, config: Qwen3Config, names: Iterable[str]) -> None:
    """Check that the files hold as many layers as config.json asks for, before a model of that depth is built."""
    held = {found[1] for found in (re.search(r"(?:^|\.)layers\.(\d+)\.", name) for name in names) if found}
    if config.num_hidden_layers > len(held):
        raise UserError(
            f"{directory / 'config.json'} has num_hidden_layers = {config.num_hidden_layers}, "
            f"but the safetensors hold {len(held)} layers"
        )


def _without_false_tie(directory: Path, config: Qwen3Config, places: Mapping[str, Place | Stack]) -> Qwen3Config:
    """Return the config with an untied head if the files hold a head that differs from the embedding.

    transformers trusts the files too, with a warning. A head that equals the embedding is tied, as config.json says.
    """
    if not config.tie_word_embeddings or HEAD not in places or EMBEDDING not in places:
        return config
    head, embedding = places[HEAD], places[EMBEDDING]
    with open_file(head.path) as one, open_file(embedding.path) as other:
        if _equal(one.get_slice(head.name), other.get_slice(embedding.name)):
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


def _check_tensors(directory: Path, wanted: dict[str, tuple[int, ...]], places: Mapping[str, Place | Stack]) -> None:
    """Check that the files hold every tensor of the model, in its shape, before any byte is copied."""
    if missing := [name for name in wanted if name not in places]:
        raise UserError(f"{directory} lacks {_some(missing)}; its config.json describes another model")
    shapes: dict[Place, tuple[int, ...]] = {}
    for name, shape in wanted.items():
        shapes |= _shapes_of_parts(directory, places[name], shape)
    found = headers_of(shapes)
    if wrong_shape := [
        f"{part.name} {list(found[part][0])}, not {list(shape)}"
        for part, shape in shapes.items()
        if found[part][0] != shape
    ]:
        raise UserError(f"{directory} has the wrong shape for {_some(wrong_shape)}")
    if wrong_dtype := [f"{part.name} of type {found[part][1]}" for part in shapes if found[part][1] not in FILE_DTYPES]:
        raise UserError(f"{directory} holds {_some(wrong_dtype)}; this engine loads {', '.join(FILE_DTYPES)}")


def _shapes_of_parts(directory: Path, place: Place | Stack, shape: tuple[int, ...]) -> dict[Place, tuple[int, ...]]:
    """Return the shape that each tensor of a parameter must have."""
    if isinstance(place, Place):
        return {place: shape}
    if len(place.entries) != shape[0]:
        raise UserError(f"{directory} has {len(place.entries)} experts for {place.name}; config.json has {shape[0]}")
    return dict.fromkeys(parts_of(place), (shape[1] // len(place.entries[0]), *shape[2:]))


def _some(names: Iterable[str], limit: int = 3) -> str:
    """Join the first few of `names` and say how many more there are."""
    names = list(names)
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
