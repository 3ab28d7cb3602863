"""Lesson 17. The row formats, int8 and int4: everything that pools, pool makers and kernels need to know about them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mini_engine.quantized import int4_rows, rows
from mini_engine.quantized.rotation import rotate


def as_it_is(x: Tensor) -> Tensor:
    """Return x."""
    return x


@dataclass(frozen=True)
class RowFormat:
    """The format in which a vector is stored as a row of bytes.

    name: as in EngineConfig's kv_dtype. dtype: of the rows, one byte each.
    row_bytes: returns the size of a row for a vector of D numbers.
    pack: vectors `[..., D]` to rows `[..., row_bytes(D)]`. unpack: rows, D and a dtype to vectors.
    rotate: applied to vectors before packing; its own inverse. Keys, values and queries are rotated alike, so scores
        do not change, and a result is rotated back. For a format without rotation, the identity.
    """

    name: str
    dtype: torch.dtype
    row_bytes: Callable[[int], int]
    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor, int, torch.dtype], Tensor]
    rotate: Callable[[Tensor], Tensor] = as_it_is

    def write(self, x: Tensor) -> Tensor:
        """Return vectors x `[..., D]` as the rows that a pool stores."""
        return self.pack(self.rotate(x.float()))

    def read(self, stored: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        """Return the vectors `[..., dim]` that stored rows encode, rotated back."""
        return self.rotate(self.unpack(stored, dim, dtype))


INT8 = RowFormat("int8", torch.int8, rows.row_bytes, rows.pack, rows.unpack)
INT4 = RowFormat("int4", torch.uint8, int4_rows.row_bytes, int4_rows.pack, int4_rows.unpack, rotate)
FORMATS = {rows.name: rows for rows in (INT8, INT4)}
