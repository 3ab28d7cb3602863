"""Lesson 17. int8 rows: one token's key or value in one head, stored as D integers and the scale that restores them.

    row = D × int8 │ zeros up to a multiple of 4 bytes │ scale, float32          x ≈ int8 · scale

Every row has its own scale, because keys differ in size from token to token and from head to head: a large key would
cost resolution in all keys that share its scale. The scale is stored in the row, so everything that moves rows (copying
blocks, compaction, records in the tiers) moves scales along. llama.cpp's q8_0 has the same layout.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

LEVELS = 127  # the largest number that is stored; -128 is not used, so that x and -x round alike
ALIGNMENT = torch.float32.itemsize


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round vectors x `[..., D]` to whole multiples of their own scale, the smallest with which all numbers fit.

    Returns:
        int8 `[..., D]` from -127 to 127, and the scales `[...]` in float32. A vector of zeros has scale 0. A vector
        with NaN or infinity has a scale that is not finite, so the fault stays visible.
    """
    x = x.float()
    scale = x.abs().amax(-1) / LEVELS
    multiples = x / scale.clamp_min(torch.finfo(scale.dtype).tiny)[..., None]
    return multiples.round().to(torch.int8), scale


def row_bytes(dim: int) -> int:
    """Return the size of a row that holds `dim` numbers and their scale."""
    return -(-dim // ALIGNMENT) * ALIGNMENT + ALIGNMENT


def pack(x: Tensor) -> Tensor:
    """Return vectors x `[..., D]` as rows, int8 `[..., row_bytes(D)]`."""
    codes, scale = quantize(x)
    rows = F.pad(codes, (0, row_bytes(x.shape[-1]) - x.shape[-1]))
    rows.view(torch.float32)[..., -1] = scale
    return rows


def unpack(rows: Tensor, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the vectors `[..., dim]` that rows `[..., row_bytes(dim)]` encode; rows must be contiguous."""
    return (rows[..., :dim] * rows.view(torch.float32)[..., -1:]).to(dtype)
