"""Lesson 3. Paged attention: one contract, several kernels.

    out = paged_attention(q, k_cache, v_cache, batch, scale)

    q             [T, H_q, D]                          the step's queries, all sequences packed one after the other
    k_cache       [num_blocks, block_size, H_kv, D]    one layer's keys; token i of a sequence lies in block
    v_cache       as k_cache                           block_table[s, i // block_size] at offset i % block_size
    batch         Batch                                three tables, which say what belongs to each of S sequences:
    cu_seqlens_q  [S + 1] int32                        q rows cu_seqlens_q[s] … cu_seqlens_q[s + 1] - 1 are sequence s
    seq_lens_kv   [S] int32                            keys each sequence has, this step's own included
    block_table   [S, max_blocks] int32                each sequence's blocks in order; later entries are not read
    scale         float                                multiplies q·k, usually D ** -0.5
    out           [T, H_q, D]                          in q's dtype

Every kernel guarantees:
- Any mix of sequences: decode rows (q_len 1), chunks after a history (q_len < kv_len), whole prompts (q_len = kv_len).
- Causality is bottom-right: query i of a sequence sees its keys 0 … kv_len - q_len + i.
- Query head h reads key/value head h // (H_q // H_kv).
- Padding is harmless: a sequence with q_len 0 is skipped, rows of q past cu_seqlens_q[-1] give zeros.
- Only slots that a sequence owns are read on its behalf. NaN in the null block, in another's block or in the unwritten
  end of its own last block changes nothing, and a table entry past its blocks is never followed, whatever it holds.

The layout is vLLM's (Kwon et al., 2023); the packed queries with their running sum are FlashAttention's varlen form.
"""

from collections.abc import Callable
from ctypes import c_void_p
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

EVERY_KEY = 2**31 - 1  # a window: the number of keys a query sees, its own included; this one hides none


class Batch(NamedTuple):
    """The sequences of one call, as the contract says: their rows of q, their numbers of keys, and their blocks."""

    cu_seqlens_q: Tensor
    seq_lens_kv: Tensor
    block_table: Tensor


class Wanted(NamedTuple):
    """The kernel that `load_kernel` is asked for, by its parameters."""

    name: str
    device: torch.device
    dtype: torch.dtype
    rows: str | None = None
    window: int = EVERY_KEY
    latents: bool = False

    @property
    def title(self) -> str:
        """The kernel's name, and what is special about its cache."""
        return " ".join(filter(None, (self.rows, "latents" if self.latents else None, self.name)))

    @property
    def cache(self) -> str:
        """The contents of the cache, in words."""
        holds = "latents" if self.latents else "keys and values"
        return f"{'rows of ' if self.rows else ''}{holds}{'' if self.window == EVERY_KEY else ' in a window'}"


class Native(NamedTuple):
    """Addresses of the C functions that write and read a kernel's caches; `paged_cpu.h` has their types.

    Other C++ writes K and V and attends through them, without Python and without knowing what a cache holds.
    """

    write: c_void_p
    attention: c_void_p


@dataclass(frozen=True)
class Kernel:
    """A kernel ready to run: calling it checks the inputs, then runs `paged_attention`.

    name: for reports.
    recordable: it reads no length on the host, so that a device can replay a call.
    native: if it is C++, returns its functions for queries of a dtype.
    wanted: what `load_kernel` was asked for.
    """

    name: str
    paged_attention: Callable[..., Tensor]
    _: KW_ONLY
    recordable: bool = False
    native: Callable[[torch.dtype], Native] | None = None
    wanted: Wanted | None = None

    def __call__(self, *inputs: Any) -> Tensor:
        """Return attention for q, k_cache, v_cache, batch and scale; ValueError from `check` before it runs."""
        self.check(*inputs[:-1])
        return self.paged_attention(*inputs)

    def check(self, *inputs: Any) -> None:
        """Raise ValueError unless this kernel can answer q, k_cache, v_cache and batch; see `check_inputs`."""
        check_inputs(*inputs)


def check_inputs(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> None:
    """Reject inputs that no kernel could answer, with one sentence, before anything runs.

    Shapes, dtypes and devices are always checked. Lengths are read only where that needs no wait for a device.

    Raises:
        ValueError: names the argument, its value and what is allowed.
    """
    _check_shapes(q, k_cache, v_cache)
    check_batch(q, k_cache, v_cache, batch)


def check_batch(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> None:
    """Check tables, devices and lengths: the part of `check_inputs` that does not depend on the caches' row format."""
    _check_tables(batch)
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache), ("block_table", batch.block_table)):
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}; put both on one device")
    if batch.block_table.device.type == "cpu":
        reach = batch.block_table.shape[1] * k_cache.shape[1]
        _check_lengths(len(q), batch.cu_seqlens_q.tolist(), batch.seq_lens_kv.tolist(), reach)


def _check_shapes(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    if q.dim() != 3:
        raise ValueError(f"q is [T, H_q, D], got shape {list(q.shape)}")
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape:
        shapes = f"{list(k_cache.shape)} and {list(v_cache.shape)}"
        raise ValueError(f"k_cache and v_cache are both [num_blocks, block_size, H_kv, D], got {shapes}")
    if q.shape[2] != k_cache.shape[3]:
        raise ValueError(f"q has head_dim {q.shape[2]} and the cache {k_cache.shape[3]}; they must be equal")
    if q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k_cache.shape[2]} key/value heads evenly")
    if not q.dtype == k_cache.dtype == v_cache.dtype:
        raise ValueError(f"q is {q.dtype}, k_cache {k_cache.dtype}, v_cache {v_cache.dtype}; use one dtype for all")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("k_cache and v_cache must be contiguous; pass one layer's tensor as it was allocated")


def _check_tables(batch: Batch) -> None:
    for name, x in zip(Batch._fields, batch, strict=True):
        if x.dtype != torch.int32:
            raise ValueError(f"{name} is {x.dtype}; kernel tables are int32")
    cu_seqlens_q, seq_lens_kv, block_table = batch
    num_seqs = seq_lens_kv.numel()
    if seq_lens_kv.dim() != 1 or cu_seqlens_q.shape != (num_seqs + 1,):
        raise ValueError(
            f"cu_seqlens_q is [S + 1] and seq_lens_kv [S], got {list(cu_seqlens_q.shape)} and {list(seq_lens_kv.shape)}"
        )
    if block_table.dim() != 2 or len(block_table) != num_seqs:
        raise ValueError(f"block_table has a row for each of the {num_seqs} sequences, got {list(block_table.shape)}")


def _check_lengths(num_rows: int, starts: list[int], kv_lens: list[int], reach: int) -> None:
    if starts[0] != 0 or starts[-1] > num_rows:
        raise ValueError(
            f"cu_seqlens_q runs from {starts[0]} to {starts[-1]}; it starts at 0 and q has {num_rows} rows"
        )
    for s, ((begin, end), kv_len) in enumerate(zip(pairwise(starts), kv_lens, strict=True)):
        if end < begin:
            raise ValueError(f"cu_seqlens_q falls from {begin} to {end} at sequence {s}; it is a running sum")
        if end - begin > kv_len:
            raise ValueError(
                f"sequence {s} has {end - begin} queries and {kv_len} keys; seq_lens_kv counts this step's tokens too"
            )
        if end > begin and kv_len > reach:
            raise ValueError(f"sequence {s} has {kv_len} keys; its row of block_table reaches {reach}")


def refuse_block(row: int, num_blocks: int, where: str = "") -> None:
    """Raise ValueError if C++ has found a row of the block table that names no block; it returns -1 otherwise."""
    if row >= 0:
        raise ValueError(f"{where}block_table row {row} names a block outside the cache's 0 … {num_blocks - 1}")
