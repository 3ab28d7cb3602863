"""Lesson 9. Describes one step to `layers.cpp`: its activations, its tables and each layer's cache."""

from collections.abc import Callable, Hashable, Sequence
from ctypes import pointer
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.attention.contract import Batch, Kernel, Native, refuse_block
from mini_engine.kv.direct import LayerCache
from mini_engine.layers import native

LINE_BYTES = 64


def alloc_padded(like: Tensor, width: int) -> Tensor:
    """Allocate len(like) rows of `width` that start an odd number of cache lines apart.

    A cache finds its lines by the lower bits of their addresses. Rows a power of two apart share those bits, so a dozen
    of them evict each other from the L1 cache.
    """
    size = like.element_size()
    lines = -(-width * size // LINE_BYTES) | 1
    return like.new_empty(len(like), lines * LINE_BYTES // size)[:, :width]


def once(owner: Tensor, key: Hashable, make: Callable[[Tensor], Any]) -> Any:
    """Return `make(owner)`, made for the first of a step's layers that asks and kept as long as `owner` lives.

    Args:
        owner: what the layers of a step share, such as x. key: the same for layers that share the result.
    """
    made = vars(owner).setdefault("made", {})
    return made[key] if key in made else made.setdefault(key, make(owner))


class Activations:
    """The memory of one step over T tokens, shared by all layers, and the struct that describes it to C++."""

    sampled: Tensor

    def __init__(
        self, x: Tensor, cos: Tensor, sin: Tensor, shape: native.Shape, exchange: native.ExchangeStruct
    ) -> None:
        width = (shape.heads + 2 * shape.kv_heads) * shape.dim
        self.x, self.cos, self.sin = x, cos, sin
        self.qkv = alloc_padded(x, width)
        self.normed = alloc_padded(x, shape.hidden)
        self.attended = alloc_padded(x, shape.heads * shape.dim)
        self.activated = alloc_padded(x, shape.intermediate)
        self.struct = native.Step(
            tokens=len(x),
            x=memory(x),
            normed=memory(self.normed),
            qkv=memory(self.qkv),
            attended=memory(self.attended),
            activated=memory(self.activated),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            samples=len(x),
            exchange=pointer(exchange),
        )

    def keep(self, rows: Tensor) -> None:
        """Make the last layer continue with `rows` only; their results move to the front."""
        self.sampled = rows.contiguous()
        self.struct.sampled, self.struct.samples = self.sampled.data_ptr(), len(rows)


def memory(rows: Tensor) -> native.Place:
    """Return the struct that describes `rows`, `[T, width]`, to C++."""
    return native.Place(rows.data_ptr(), rows.stride(0))


def starts_of(rows: Tensor, cu_seqlens_q: Tensor) -> Tensor | None:
    """Return `cu_seqlens_q` for `rows` only; None unless each is the last of its sequence and they are in order.

    The last row of a sequence sees all its keys, as in decode, so attention needs to know only which rows remain.
    """
    ends = cu_seqlens_q[1:].long() - 1
    chosen = torch.isin(ends, rows) & (ends >= cu_seqlens_q[:-1])
    if not torch.equal(ends[chosen], rows):
        return None
    return F.pad(chosen.cumsum(0), (1, 0)).int()


class Tables(NamedTuple):
    """Tables that all layers share, contiguous int32. sampled_starts: `cu_seqlens_q` for the last layer's attention."""

    starts: Tensor
    sampled_starts: Tensor
    kv_lens: Tensor


def contiguous(caches: Sequence[LayerCache]) -> Sequence[LayerCache]:
    """Return the caches with slots and tables that C++ can read."""
    if all(c.slots.is_contiguous() and c.block_table.is_contiguous() for c in caches):
        return caches
    return [c._replace(slots=c.slots.contiguous(), block_table=c.block_table.contiguous()) for c in caches]


def check_caches(q: Tensor, caches: Sequence[LayerCache], kernel: Kernel, tables: Tables) -> None:
    """Raise ValueError unless the caches fit queries like q `[T, H_q, D]`, the step's tables and the kernel.

    Of layers that share slots and table, only the first is checked: all of a store's tensors have one shape.
    """
    known = set()
    for layer, cache in enumerate(caches):
        if (shared := (id(cache.slots), id(cache.block_table))) in known:
            continue
        known.add(shared)
        try:
            kernel.check(q, cache.k, cache.v, Batch(tables.starts, tables.kv_lens, cache.block_table))
            check_slots(cache, caches[0].k, len(q))
        except ValueError as error:
            raise ValueError(f"layer {layer}: {error}") from None


def check_slots(cache: LayerCache, first: Tensor, num_tokens: int) -> None:
    """Raise ValueError unless each token has a slot of this cache, which has the shape of the `first` layer's."""
    if cache.k.shape != first.shape:
        raise ValueError(f"its cache is {list(cache.k.shape)}, the first layer's {list(first.shape)}; use one shape")
    slots, num_slots = cache.slots, first.shape[0] * first.shape[1]
    if slots.dtype != torch.int64 or slots.shape != (num_tokens,):
        raise ValueError(f"slot_mapping is {slots.dtype} {list(slots.shape)}; slots are int64 [{num_tokens}]")
    values = slots.tolist()
    if num_tokens and not 0 <= min(values) <= max(values) < num_slots:
        raise ValueError(f"slots {min(values)} … {max(values)} are not all in 0 … {num_slots - 1}")


def refuse_table(bad: int, pool: native.Pool) -> None:
    """Raise ValueError if `bad_table` of `pool.h` has found a table that names no block; it returns -1 otherwise."""
    if bad >= 0:
        layer, row = divmod(bad, pool.num_seqs)
        refuse_block(row, pool.num_blocks, f"layer {layer}: ")


def pool_struct(functions: Native, caches: Sequence[LayerCache], tables: Tables, scale: float) -> native.Pool:
    """Return the pool as C++ takes it. `caches` must be contiguous and outlive the struct."""
    structs = (
        native.Cache(
            k=cache.k.data_ptr(),
            v=cache.v.data_ptr(),
            slots=cache.slots.data_ptr(),
            table=cache.block_table.data_ptr(),
            max_blocks=cache.block_table.shape[1],
            window=cache.window,
        )
        for cache in caches
    )
    num_blocks, block_size = caches[0].k.shape[:2]
    return native.Pool(
        write=functions.write,
        attention=functions.attention,
        caches=(native.Cache * len(caches))(*structs),
        starts=tables.starts.data_ptr(),
        sampled_starts=tables.sampled_starts.data_ptr(),
        kv_lens=tables.kv_lens.data_ptr(),
        num_seqs=len(tables.kv_lens),
        num_blocks=num_blocks,
        block_size=block_size,
        scale=scale,
    )
