"""Lesson 0. Reads safetensors files: some rows of a tensor, and the shapes and dtypes of many."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mini_engine.base.errors import UserError, first_line
from mini_engine.checkpoint.names import Place, Stack


def read_rows(place: Place | Stack, rows: range, columns: range | None = None) -> Tensor:
    """Return these rows of a stored tensor: a view of the file, which stays mapped as long as the view is in use.

    Of a stack, whose entries are whole rows, they are a copy.
    """
    if isinstance(place, Stack):
        return _read_entries(place.entries[rows.start : rows.stop])
    with open_file(place.path) as file:
        stored, these = file.get_slice(place.name), slice(rows.start, rows.stop)
        return stored[these] if columns is None else stored[these, columns.start : columns.stop]


def _read_entries(entries: Sequence[Sequence[Place]]) -> Tensor:
    """Return entries of a stack, each of its parts one after the other."""
    tensors: dict[Place, Tensor] = {}
    parts = [part for entry in entries for part in entry]
    for path in dict.fromkeys(part.path for part in parts):
        with open_file(path) as file:
            tensors |= {part: file.get_tensor(part.name) for part in parts if part.path == path}
    return torch.stack([torch.cat([tensors[part] for part in entry]) for entry in entries])


@contextmanager
def open_file(path: Path) -> Iterator[Any]:
    """Open a safetensors file; any failure becomes a UserError."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise UserError(f"{path} does not exist, though the checkpoint names it; download it again") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a valid safetensors file ({first_line(error)}); download it again") from error


def headers_of(parts: Iterable[Place]) -> dict[Place, tuple[tuple[int, ...], str]]:
    """Return the shape and dtype of stored tensors; each file is opened once."""
    by_path: dict[Path, list[Place]] = {}
    for part in parts:
        by_path.setdefault(part.path, []).append(part)
    found = {}
    for path, its in by_path.items():
        with open_file(path) as file:
            for part in its:
                header = file.get_slice(part.name)
                found[part] = tuple(header.get_shape()), header.get_dtype()
    return found
