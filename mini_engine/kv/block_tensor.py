"""Lesson 3. A pool with the block as a dimension, and tables that a kernel walks: no gather.

The bytes are lesson 2's. `[num_blocks, block_size, H_kv, D]` is written through its flat view, slot by slot, and read
by a kernel that follows each sequence's block table. Block 0 is the null block: nobody is given it, and the unused
entries of a block table point at it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mini_engine.config import Qwen3Config
from mini_engine.errors import OutOfBlocks, UserError
from mini_engine.kv.block_table import NULL_BLOCK, BlockTable
from mini_engine.kv.token_flat import check_slots


@dataclass(frozen=True)
class ForwardMeta:
    """One packed step over S sequences: any mix of prefills, chunks and decodes.

    positions: `[T]` int64, each fed token's place in its own sequence.
    slot_mapping: `[T]` int64, the slots that take this step's K and V.
    cu_seqlens_q: `[S + 1]` int32; sequence s feeds rows cu_seqlens_q[s] … cu_seqlens_q[s + 1] - 1.
    seq_lens_kv: `[S]` int32, tokens each sequence may see, this step's included.
    block_table: `[S, max_blocks]` int32, each sequence's blocks in order, then null blocks.
    block_size: slots in a block.
    """

    positions: Tensor
    slot_mapping: Tensor
    cu_seqlens_q: Tensor
    seq_lens_kv: Tensor
    block_table: Tensor
    block_size: int


class KvPool:
    """K and V for all requests, `[num_blocks, block_size, H_kv, D]` for each layer.

    `kernel` is a paged-attention kernel of `mini_engine.attention`; it reads the pool where it lies.

    Raises:
        UserError: a pool of this size cannot be, or there is no memory for it.
    """

    def __init__(
        self,
        config: Qwen3Config,
        num_blocks: int,
        block_size: int,
        kernel: Callable[..., Tensor],
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        if not all(isinstance(size, int) and size > 0 for size in (num_blocks, block_size)):
            raise UserError(f"{num_blocks} blocks of {block_size} slots are no pool; give whole numbers of 1 or more")
        shape = (num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        try:
            self.K = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
            self.V = [torch.zeros_like(k) for k in self.K]
        except RuntimeError as error:
            wanted = num_blocks * block_size * config.kv_bytes_per_token(dtype)
            raise UserError(
                f"{num_blocks} blocks of {block_size} slots need {wanted / 2**30:.1f} GiB, which cannot be had here; "
                "give fewer blocks"
            ) from error
        self.kernel = kernel

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included."""
        return len(self.K[0])

    @property
    def device(self) -> torch.device:
        """Where the pool lives, and so where a plan's tensors must."""
        return self.K[0].device

    @property
    def bytes(self) -> int:
        """Bytes of the whole pool, used or not."""
        return sum(x.nbytes for x in (*self.K, *self.V))

    def set_kv(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v `[T, H_kv, D]` into the slots `slot_mapping` `[T]` int64, through the flat view.

        Raises:
            ValueError: the three do not fit each other or the pool (`check_slots`); nothing is written.
        """
        flat_k, flat_v = self.K[layer].flatten(0, 1), self.V[layer].flatten(0, 1)
        expected = (len(slot_mapping), *flat_k.shape[1:])
        if k.shape != expected or v.shape != expected:
            raise ValueError(
                f"k {tuple(k.shape)} and v {tuple(v.shape)} must both be {expected}, one row for each slot"
            )
        check_slots(slot_mapping, len(flat_k))
        flat_k[slot_mapping] = k
        flat_v[slot_mapping] = v

    def attend(self, layer: int, q: Tensor, meta: ForwardMeta) -> Tensor:
        """Attention of the packed q `[T, H_q, D]`, each sequence over its own blocks."""
        return self.kernel(
            q,
            self.K[layer],
            self.V[layer],
            meta.cu_seqlens_q,
            meta.seq_lens_kv,
            meta.block_table,
            q.shape[-1] ** -0.5,
        )

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks in every layer, as if all sources were read before any target is written.

        Raises:
            ValueError: lengths differ, a target is named twice, or an id is not a block that can be held.
        """
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} sources and {len(targets)} targets; give one target for each source")
        if len(set(targets)) != len(targets):
            raise ValueError(f"a target is named twice in {list(targets)}; which copy should win?")
        if stray := [b for b in (*sources, *targets) if not NULL_BLOCK < b < self.num_blocks]:
            raise ValueError(f"blocks {stray} are not in 1 … {self.num_blocks - 1}")
        for layer in (*self.K, *self.V):
            layer[list(targets)] = layer[list(sources)]


@dataclass
class Request:
    """One sequence of a packed batch. `cur_len` counts tokens whose KV is written."""

    prompt_ids: list[int]
    table: BlockTable
    cur_len: int = 0
    output_ids: list[int] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and answer so far."""
        return self.prompt_ids + self.output_ids


def reserve_all(requests: Sequence[Request]) -> None:
    """Make room in every table for its request's tokens: all of them, or OutOfBlocks and none."""
    before = [request.table.num_tokens for request in requests]
    try:
        for request in requests:
            request.table.append(len(request.token_ids) - request.table.num_tokens)
    except OutOfBlocks:
        for request, num_tokens in zip(requests, before, strict=True):
            request.table.truncate(num_tokens)
        raise


def plan_packed(requests: Sequence[Request], block_size: int, device: torch.device) -> ForwardMeta:
    """Feed every request the tokens whose KV is missing, one after another in one row of tokens.

    Room must be reserved. A request just admitted feeds its prompt, one that decodes feeds one token.
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
