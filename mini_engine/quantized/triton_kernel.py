"""Lesson 17. The Triton kernels for rows: lesson 3's, with other ways to load keys and values."""

import triton
import triton.language as tl
from torch import Tensor

from mini_engine.attention import triton_kernel as plain
from mini_engine.attention.contract import EVERY_KEY, Batch


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float, window: int = EVERY_KEY, *, rows: str
) -> Tensor:
    """Implement the contract for caches of these rows. Block ids are trusted: a check would wait for the device."""
    return plain.launch(LOADERS[rows], q, k_cache, v_cache, batch, scale, window)


@triton.jit
def _load_int8(cache, row, mask, d, DIM: tl.constexpr):
    """Load rows of the cache as numbers, `[KEYS, WIDTH]` float32; the scale is a row's last 4 bytes."""
    BYTES: tl.constexpr = (DIM + 3) // 4 * 4 + 4
    begin = cache + row * BYTES
    scale = tl.load((begin + (BYTES - 4)).to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
    values = tl.load(begin[:, None] + d[None, :], mask=mask[:, None] & (d < DIM)[None, :], other=0)
    return values.to(tl.float32) * scale[:, None]


@triton.jit
def _load_int4(cache, row, mask, d, DIM: tl.constexpr):
    """Do the same for int4. A byte holds two codes; after them come the steps of all groups of 32, then the leasts.

    Each byte, step and least is loaded once. A separate address for each number would take all of a thread's registers.
    """
    CODES: tl.constexpr = (DIM + 7) // 8 * 4
    GROUPS: tl.constexpr = (DIM + 31) // 32
    KEYS: tl.constexpr = row.shape[0]
    WIDTH: tl.constexpr = d.shape[0]
    SIZE: tl.constexpr = 32 if WIDTH > 32 else WIDTH  # pyright: ignore
    begin = cache + row * (CODES + 4 * GROUPS)
    byte, group = tl.arange(0, WIDTH // 2), tl.arange(0, WIDTH // SIZE)
    pairs = tl.load(begin[:, None] + byte[None, :], mask=mask[:, None] & (byte < CODES)[None, :], other=0)
    codes = tl.reshape(tl.join(pairs & 15, pairs >> 4), (KEYS, WIDTH // SIZE, SIZE)).to(tl.float32)
    steps = (begin + CODES).to(tl.pointer_type(tl.float16))[:, None] + group[None, :]
    real = mask[:, None] & (group < GROUPS)[None, :]
    step, least = tl.load(steps, mask=real, other=0.0), tl.load(steps + GROUPS, mask=real, other=0.0)
    numbers = codes * step.to(tl.float32)[:, :, None] + least.to(tl.float32)[:, :, None]
    return tl.where((d < DIM)[None, :], tl.reshape(numbers, (KEYS, WIDTH)), 0.0)


LOADERS = {"int8": _load_int8, "int4": _load_int4}
