"""Lesson 17. int4 rows: one token's key or value in one head as 4-bit codes, each group of 32 with a step and a least.

    row = codes, two in a byte │ zeros up to 4 bytes │ steps, float16 │ leasts, float16      x ≈ code · step + least

Number 2i is in the lower half of byte i, number 2i + 1 in the upper half. With only 16 levels, none may be wasted, so a
group spans exactly from its least number to its largest, and small groups keep one large number from widening the steps
of the others. A group takes 20 bytes, 5 bits a number, like a block of llama.cpp's q4_1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32  # numbers that share a step and a least; the last group of a vector may have fewer
LEVELS = 15  # the largest code; the smallest is 0
ALIGNMENT = 4


def quantize4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round vectors x `[..., D]` to 16 evenly spaced levels, of which each group's least and largest number are two.

    Returns:
        codes uint8 `[..., D]` from 0 to 15, steps and leasts float16 `[..., groups]`: each number's code is that of the
        nearest level as these two, stored, give it. A group of equal numbers has step 0. A group with NaN, infinity or
        numbers beyond float16's range has a step or a least that is not finite, so the fault stays visible.
    """
    x, dim = x.float(), x.shape[-1]
    if spare := -dim % GROUP:
        x = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], spare)), dim=-1)  # keeps the least and the largest
    groups = x.unflatten(-1, (-1, GROUP))
    least, largest = groups.aminmax(dim=-1)
    step, least = ((largest - least) / LEVELS).half(), least.half()
    codes = (groups - least[..., None].float()) / step.float().clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    return codes.round().clamp(0, LEVELS).to(torch.uint8).flatten(-2)[..., :dim], step, least


def num_groups(dim: int) -> int:
    """Return the number of groups in a vector of `dim` numbers."""
    return -(-dim // GROUP)


def code_bytes(dim: int) -> int:
    """Return the bytes of the codes of `dim` numbers: half a byte each, in whole words of 4 bytes."""
    return -(-dim // (2 * ALIGNMENT)) * ALIGNMENT


def row_bytes(dim: int) -> int:
    """Return the size of a row that holds `dim` numbers with the steps and leasts of their groups."""
    return code_bytes(dim) + 2 * torch.float16.itemsize * num_groups(dim)


def pack(x: Tensor) -> Tensor:
    """Return vectors x `[..., D]` as rows, uint8 `[..., row_bytes(D)]`."""
    return joined(*quantize4(x))


def joined(codes: Tensor, step: Tensor, least: Tensor) -> Tensor:
    """Return the results of `quantize4` as rows: codes `[..., D]` uint8, step and least `[..., groups]` float16."""
    dim = codes.shape[-1]
    codes = F.pad(codes, (0, 2 * code_bytes(dim) - dim))
    return torch.cat((codes[..., ::2] | codes[..., 1::2] << 4, torch.cat((step, least), -1).view(torch.uint8)), -1)


def unpack(rows: Tensor, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the vectors `[..., dim]` that rows `[..., row_bytes(dim)]` encode; rows must be contiguous."""
    pairs, steps = rows[..., : code_bytes(dim)], rows.view(torch.float16)[..., -2 * num_groups(dim) :].float()
    codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)[..., :dim]
    step, least = (x.repeat_interleave(GROUP, dim=-1)[..., :dim] for x in steps.chunk(2, dim=-1))
    return (codes * step + least).to(dtype)
