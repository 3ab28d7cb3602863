"""Lesson 9. Describes one step to `layers.cpp`: its activations, its tables and lesson 3's pool."""

import ctypes
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.attention.cpu import kernel_address, sizes_of
from mini_engine.kv.block_tensor import KvPool
from mini_engine.layers import native

LINE_BYTES = 64


def alloc_padded(like: Tensor, width: int) -> Tensor:
    """Allocate len(like) rows of `width` that start an odd number of cache lines apart.

    A cache finds its lines by the lower bits of their addresses. Rows a power of two apart share those bits, so a dozen
    of them evict each other from the first-level cache.
    """
    size = like.element_size()
    lines = -(-width * size // LINE_BYTES) | 1
    return like.new_empty(len(like), lines * LINE_BYTES // size)[:, :width]


class Activations:
    """The memory of one step over T tokens, shared by all layers, and the struct that describes it to C++."""

    def __init__(self, x: Tensor, cos: Tensor, sin: Tensor, slot_mapping: Tensor, shape: native.Shape) -> None:
        width = (shape.heads + 2 * shape.kv_heads) * shape.dim
        self.x, self.cos, self.sin = x, cos, sin
        self.slots = slot_mapping.contiguous()
        self.qkv = alloc_padded(x, width)
        self.normed = alloc_padded(x, shape.hidden)
        self.attended = alloc_padded(x, shape.heads * shape.dim)
        self.activated = alloc_padded(x, shape.intermediate)
        self.sampled = self.slots[:0]
        self.struct = native.Step(
            tokens=len(x),
            x=memory(x),
            normed=memory(self.normed),
            qkv=memory(self.qkv),
            attended=memory(self.attended),
            activated=memory(self.activated),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            slots=self.slots.data_ptr(),
        )

    def keep(self, rows: Tensor) -> None:
        """Make the last layer continue with `rows` only; their results move to the front."""
        self.sampled = rows.contiguous()
        self.struct.sampled, self.struct.samples = self.sampled.data_ptr(), len(rows)


def memory(rows: Tensor) -> native.Memory:
    """Return the struct that describes `rows`, `[T, width]`, to C++."""
    return native.Memory(data=rows.data_ptr(), stride=rows.stride(0))


def starts_of(rows: Tensor, cu_seqlens_q: Tensor) -> Tensor | None:
    """Return `cu_seqlens_q` for `rows` only, or None unless each is the last of its sequence and they are in order.

    The last row of a sequence sees all its keys, as in decode, so attention needs to know only which rows there are.
    """
    ends = cu_seqlens_q[1:].long() - 1
    chosen = torch.isin(ends, rows) & (ends >= cu_seqlens_q[:-1])
    if not torch.equal(ends[chosen], rows):
        return None
    return F.pad(chosen.cumsum(0), (1, 0)).int()


class Tables(NamedTuple):
    """A step's tables, contiguous int32. `sampled_starts` is `cu_seqlens_q` for the last layer's attention."""

    starts: Tensor
    sampled_starts: Tensor
    kv_lens: Tensor
    block_table: Tensor


def pool_struct(kv: KvPool, q: Tensor, out: Tensor, tables: Tables) -> native.Pool:
    """Return the arguments of lesson 3's kernel, which reads `q` `[T, H_q, D]` in place and writes `out`."""
    k, v = ((ctypes.c_void_p * len(side))(*(x.data_ptr() for x in side)) for side in (kv.K, kv.V))
    return native.Pool(
        attention=kernel_address(q.dtype),
        k=k,
        v=v,
        starts=tables.starts.data_ptr(),
        sampled_starts=tables.sampled_starts.data_ptr(),
        kv_lens=tables.kv_lens.data_ptr(),
        table=tables.block_table.data_ptr(),
        sizes=sizes_of(q, out, kv.K[0], tables.block_table),
        scale=q.shape[2] ** -0.5,
    )
