"""Lesson 3. A KV pool with a block dimension, which attention kernels read through block tables.

The bytes are laid out as in lesson 2. `[num_blocks, block_size, H_kv, D]` is written slot by slot through its flat view
and read by a kernel that follows each sequence's block table. Block 0 is the null block: it is never allocated, and
the unused entries of a block table point at it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mini_engine.attention.contract import Batch
from mini_engine.base.errors import OutOfBlocks, UserError
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.kv.block_table import NULL_BLOCK, BlockTable
from mini_engine.kv.direct import LayerCache
from mini_engine.kv.store import Store
from mini_engine.kv.token_flat import check_slots


@dataclass(frozen=True)
class ForwardMeta:
    """One packed step over S sequences: any mix of prefills, chunks and decodes.

    positions: `[T]` int64, each fed token's position in its own sequence.
    slot_mapping: `[T]` int64, the slots this step's K and V are written to.
    cu_seqlens_q: `[S + 1]` int32; rows cu_seqlens_q[s] … cu_seqlens_q[s + 1] - 1 belong to sequence s.
    seq_lens_kv: `[S]` int32, the number of keys of each sequence, this step's tokens included.
    block_table: `[S, max_blocks]` int32, each sequence's blocks in order, padded with the null block.
    block_size: slots in a block.
    """

    positions: Tensor
    slot_mapping: Tensor
    cu_seqlens_q: Tensor
    seq_lens_kv: Tensor
    block_table: Tensor
    block_size: int

    @property
    def batch(self) -> Batch:
        """The tables that a kernel takes."""
        return Batch(self.cu_seqlens_q, self.seq_lens_kv, self.block_table)


def allocate_layers(
    num_layers: int, shape: Sequence[int], dtype: torch.dtype, device: str | torch.device
) -> list[Tensor]:
    """Return one tensor of `shape` for each layer, with only the null block cleared.

    Every other slot is written before it is read. Clearing those too would touch every page of a pool that may never
    fill up, at a cost of half a second per GiB.
    """
    layers = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
    for layer in layers:
        layer[NULL_BLOCK] = 0
    return layers


@dataclass(frozen=True)
class KvShape:
    """The shape of a pool, where it is not that of the whole model."""

    num_hidden_layers: int
    k_shape: tuple[int, int]
    v_shape: tuple[int, int]

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token in all layers."""
        return (math.prod(self.k_shape) + math.prod(self.v_shape)) * self.num_hidden_layers * dtype.itemsize


PoolShape = Qwen3Config | KvShape


class KvPool(Store):
    """K and V of all requests, `[num_blocks, block_size, H_kv, D]` for each layer, as the shape says.

    `num_blocks` includes the null block. `kernel` is a paged-attention kernel of `mini_engine.attention`; it reads the
    pool in place. `direct` says that layers may take its `layer_caches`, and write and read them without
    calling the pool: with the kernel's functions, or, where K and V are stored as they are, with their own.

    Raises:
        UserError: a size is not a positive integer, or the pool does not fit in memory.
    """

    direct = True

    def __init__(
        self,
        config: PoolShape,
        num_blocks: int,
        block_size: int,
        kernel: Callable[..., Tensor],
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        if not all(isinstance(size, int) and size > 0 for size in (num_blocks, block_size)):
            raise UserError(f"{num_blocks} blocks of {block_size} slots do not make a pool; use integers of at least 1")
        layers, blocks = config.num_hidden_layers, (num_blocks, block_size)
        try:
            self.K = allocate_layers(layers, (*blocks, *config.k_shape), dtype, device)
            self.V = allocate_layers(layers, (*blocks, *config.v_shape), dtype, device)
        except (RuntimeError, TypeError) as error:  # TypeError: not even 64 bits hold the size
            wanted = num_blocks * block_size * config.kv_bytes_per_token(dtype)
            raise UserError(
                f"{num_blocks} blocks of {block_size} slots need {wanted / 2**30:.1f} GiB, "
                "which is more than is available; use fewer blocks"
            ) from error
        self.kernel = kernel

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included."""
        return len(self.K[0])

    @property
    def parts(self) -> Sequence[Sequence[Tensor]]:
        """K and V: lists of one tensor per layer, whose first dimension counts blocks."""
        return self.K, self.V

    @property
    def device(self) -> torch.device:
        """The pool's device; a plan's tensors must be on it."""
        return self.K[0].device

    @property
    def bytes(self) -> int:
        """Size of the whole pool in bytes, used or not."""
        return sum(x.nbytes for x in (*self.K, *self.V))

    def set_kv(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v `[T, H_kv, D]` into the slots `slot_mapping` `[T]` int64, through the flat view.

        Raises:
            ValueError: k or v is not `[T, H_kv, D]`, or a slot is not in the pool. Nothing is written. `check_slots`
                does not read slots on a device, since every layer would wait for it.
        """
        flat_k, flat_v = self.K[layer].flatten(0, 1), self.V[layer].flatten(0, 1)
        of_k, of_v = ((len(slot_mapping), *flat.shape[1:]) for flat in (flat_k, flat_v))
        if k.shape != of_k or v.shape != of_v:
            raise ValueError(
                f"k {tuple(k.shape)} and v {tuple(v.shape)} must be {of_k} and {of_v}, one row for each slot"
            )
        check_slots(slot_mapping, len(flat_k))
        flat_k[slot_mapping] = k
        flat_v[slot_mapping] = v

    def attend(self, layer: int, q: Tensor, meta: ForwardMeta) -> Tensor:
        """Compute attention of the packed q `[T, H_q, D]`, each sequence over its own blocks, read in place."""
        return self.kernel(q, self.K[layer], self.V[layer], meta.batch, q.shape[-1] ** -0.5)

    def layer_caches(self, meta: ForwardMeta) -> list[LayerCache]:
        """Return the tensors of each layer, with the slots and the table that all layers share."""
        return [LayerCache(k, v, meta.slot_mapping, meta.block_table) for k, v in zip(self.K, self.V, strict=True)]

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy block sources[i] to targets[i] in every layer, K and V, as if all were read before any is written.

        A source may be named several times, and the lists may be empty.

        Raises:
            ValueError: the lengths differ, a target is named twice, or an id is outside 1 … num_blocks - 1. Nothing is
                copied.
        """
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} sources and {len(targets)} targets; name one target for each source")
        if len(set(targets)) != len(targets):
            raise ValueError(f"a target is named twice in {list(targets)}; name each target once")
        if stray := [b for b in (*sources, *targets) if not NULL_BLOCK < b < self.num_blocks]:
            raise ValueError(f"blocks {stray} are not in 1 … {self.num_blocks - 1}")
        for layer in (*self.K, *self.V):
            layer[list(targets)] = layer[list(sources)]


@dataclass
class PackedRequest:
    """One sequence of a packed batch. `cur_len` counts the tokens whose KV is written."""

    prompt_ids: list[int]
    table: BlockTable
    cur_len: int = 0
    output_ids: list[int] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """The prompt and the answer so far."""
        return self.prompt_ids + self.output_ids


def reserve_all(requests: Sequence[PackedRequest]) -> None:
    """Make room in every table for all of its request's tokens.

    Raises:
        OutOfBlocks: the pool has too few free blocks for all of them; every table is as it was before.
    """
    before = [request.table.num_tokens for request in requests]
    try:
        for request in requests:
            request.table.append(len(request.token_ids) - request.table.num_tokens)
    except OutOfBlocks:
        for request, num_tokens in zip(requests, before, strict=True):
            request.table.truncate(num_tokens)
        raise


def plan_packed(requests: Sequence[PackedRequest], block_size: int, device: torch.device) -> ForwardMeta:
    """Plan to feed each request's tokens that have no KV yet, packed one request after another.

    Room must be reserved. A newly admitted request feeds its prompt; one that decodes feeds a single token. The shapes
    and dtypes are those of ForwardMeta, and every tensor is on `device`. The requests are not changed.
    """
    positions, slots, cu_seqlens_q = [], [], [0]
    for request in requests:
        stop = len(request.token_ids)
        positions += range(request.cur_len, stop)
        slots += request.table.slots(request.cur_len, stop)
        cu_seqlens_q.append(len(positions))
    width = max(len(request.table.blocks) for request in requests)
    rows = [r.table.blocks + [NULL_BLOCK] * (width - len(r.table.blocks)) for r in requests]
    lens = [len(request.token_ids) for request in requests]

    def tensor(data: list, dtype: torch.dtype) -> Tensor:
        return torch.tensor(data, dtype=dtype, device=device)

    return ForwardMeta(
        positions=tensor(positions, torch.int64),
        slot_mapping=tensor(slots, torch.int64),
        cu_seqlens_q=tensor(cu_seqlens_q, torch.int32),
        seq_lens_kv=tensor(lens, torch.int32),
        block_table=tensor(rows, torch.int32),
        block_size=block_size,
    )
