"""Lesson 2. Token-flat paging: one pool of slots for everybody, handed out in blocks, read by gathering.

A slot holds K and V of one token, in every layer. A block is `block_size` slots in a row, and the only thing that is
ever handed out. Token i of a request lies in slot `block_id * block_size + offset`, wherever its block happens to be.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.attention.dense import causal_attention
from mini_engine.config import Qwen3Config
from mini_engine.errors import OutOfBlocks, UserError


@dataclass(frozen=True)
class ForwardMeta:
    """One step's plan.

    positions: `[T]` int64, each fed token's place in its sequence.
    slot_mapping: `[T]` int64, the slots that take this step's K and V.
    kv_indices: `[T_kv]` int64, the slots that hold the history, in order, this step's tokens included.
    is_prefill: several queries, so that they need a causal mask; a decode's one query sees all.
    """

    positions: Tensor
    slot_mapping: Tensor
    kv_indices: Tensor
    is_prefill: bool


class KvPool:
    """K and V for all requests, `[num_slots, H_kv, D]` for each layer. It does not know whose slot is whose."""

    def __init__(
        self,
        config: Qwen3Config,
        num_slots: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        shape = (num_slots, config.num_key_value_heads, config.head_dim)
        self.K = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.V = [torch.empty_like(k) for k in self.K]

    @property
    def device(self) -> torch.device:
        """Where the pool lives, and so where a plan's tensors must."""
        return self.K[0].device

    @property
    def bytes(self) -> int:
        """Bytes of the whole pool, used or not."""
        return sum(x.nbytes for x in (*self.K, *self.V))

    def set_kv(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v `[T, H_kv, D]` into the slots `slot_mapping` `[T]` int64 of this layer, in place.

        Raises:
            ValueError: the three do not fit each other or the pool; nothing is written.
        """
        expected = (len(slot_mapping), *self.K[layer].shape[1:])
        if k.shape != expected or v.shape != expected:
            raise ValueError(
                f"k {tuple(k.shape)} and v {tuple(v.shape)} must both be {expected}, one row for each slot"
            )
        self.K[layer][slot_mapping] = k
        self.V[layer][slot_mapping] = v

    def attend(self, layer: int, q: Tensor, meta: ForwardMeta) -> Tensor:
        """Gather the history of q `[T, H_q, D]` from its slots, in order, and attend to it."""
        k = self.K[layer][meta.kv_indices]
        v = self.V[layer][meta.kv_indices]
        return causal_attention(q, k, v) if meta.is_prefill else attend_to_all(q, k, v)


def attend_to_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A decode's attention: one query `[1, H_q, D]` over keys and values `[T_kv, H_kv, D]`, no mask."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1)


class BlockAllocator:
    """The free list: which blocks of the pool nobody holds. Last returned, first handed out."""

    def __init__(self, num_slots: int, block_size: int = 16) -> None:
        if block_size < 1 or num_slots < block_size or num_slots % block_size:
            raise UserError(
                f"{num_slots} slots cannot be cut into blocks of {block_size}; "
                "give a block size of at least 1 and a multiple of it as slots"
            )
        self.block_size = block_size
        self.num_blocks = num_slots // block_size
        self.free_blocks = list(range(self.num_blocks))[::-1]  # the end is handed out first: 0, 1, 2, …
        self.held: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that can still be handed out."""
        return len(self.free_blocks)

    def alloc_blocks(self, n: int) -> list[int]:
        """Hand out n block ids; `[]` for 0.

        Raises:
            OutOfBlocks: fewer than n are free; nothing was changed.
            ValueError: n is negative.
        """
        if n < 0:
            raise ValueError(f"{n} blocks were asked for; ask for 0 or more")
        if n > len(self.free_blocks):
            raise OutOfBlocks(f"need {n} blocks, {len(self.free_blocks)} free of {self.num_blocks}")
        cut = len(self.free_blocks) - n
        blocks = self.free_blocks[cut:][::-1]
        del self.free_blocks[cut:]
        self.held.update(blocks)
        return blocks

    def free(self, blocks: Collection[int]) -> None:
        """Take blocks back.

        Raises:
            ValueError: a block is named twice or is not held: freed before, or never given. Nothing was changed.
        """
        returned = set(blocks)
        if len(returned) != len(blocks):
            raise ValueError(f"a block is named twice in {list(blocks)}; each can be freed once")
        if not returned <= self.held:
            raise ValueError(
                f"blocks {sorted(returned - self.held)} are not held; they were freed before or never given"
            )
        self.held -= returned
        self.free_blocks.extend(blocks)


@dataclass
class Request:
    """One sequence: its tokens, the blocks it holds, and how far its KV is written.

    `cur_len` counts tokens whose KV is in the pool. After a prefill of T it is T: the token just chosen has none yet.
    """

    prompt_ids: list[int]
    blocks: list[int] = field(default_factory=list)
    slot_indices: list[int] = field(default_factory=list)
    cur_len: int = 0
    output_ids: list[int] = field(default_factory=list)


def reserve(request: Request, allocator: BlockAllocator, target_len: int) -> None:
    """Let `request` hold blocks for `target_len` tokens, and list its new slots in order.

    Raises:
        OutOfBlocks: the pool cannot give the missing blocks; nothing was changed.
    """
    size = allocator.block_size
    missing = -(-target_len // size) - len(request.blocks)
    new_blocks = allocator.alloc_blocks(max(0, missing))
    request.blocks.extend(new_blocks)
    for block in new_blocks:
        request.slot_indices.extend(range(block * size, (block + 1) * size))


def plan_prefill(request: Request, device: torch.device) -> ForwardMeta:
    """Feed the prompt tokens that have no KV yet. Their slots must be reserved."""
    length = len(request.prompt_ids)
    slots = torch.tensor(request.slot_indices[:length], dtype=torch.int64, device=device)
    positions = torch.arange(request.cur_len, length, device=device)
    return ForwardMeta(positions, slot_mapping=slots[request.cur_len :], kv_indices=slots, is_prefill=True)


def plan_decode(request: Request, device: torch.device) -> ForwardMeta:
    """Feed one token, the last one chosen, whose place is `cur_len`. Its slot must be reserved."""
    slots = torch.tensor(request.slot_indices[: request.cur_len + 1], dtype=torch.int64, device=device)
    positions = torch.tensor([request.cur_len], device=device)
    return ForwardMeta(positions, slot_mapping=slots[-1:], kv_indices=slots, is_prefill=False)


class PagedSequence:
    """A request as the loop of lesson 0 sees it: plan, run, commit."""

    def __init__(self, request: Request, pool: KvPool, allocator: BlockAllocator) -> None:
        self.request, self.pool, self.allocator = request, pool, allocator

    def plan(self, token_ids: list[int]) -> ForwardMeta:
        """Reserve room for `token_ids` and feed those whose KV is missing; OutOfBlocks changes nothing.

        Raises:
            ValueError: these are another sequence's tokens, or its KV is further already; nothing was changed.
        """
        request = self.request
        expected = max(len(request.prompt_ids), request.cur_len + 1)
        if len(token_ids) != expected or token_ids[: len(request.prompt_ids)] != list(request.prompt_ids):
            raise ValueError("this sequence has run already or has another prompt; make a new one for each answer")
        reserve(request, self.allocator, len(token_ids))
        request.output_ids = token_ids[len(request.prompt_ids) :]
        plan = plan_decode if request.cur_len >= len(request.prompt_ids) else plan_prefill
        return plan(request, self.pool.device)

    def commit(self, meta: ForwardMeta) -> None:
        """The step has run: as many tokens as it fed now have their KV in the pool."""
        self.request.cur_len += len(meta.positions)

    def release(self) -> None:
        """Give every block back; the request holds nothing afterwards."""
        self.allocator.free(self.request.blocks)
        self.request.blocks, self.request.slot_indices, self.request.cur_len = [], [], 0


def pool_slots(config: Qwen3Config, dtype: torch.dtype, budget_bytes: int, block_size: int = 16) -> int:
    """How many slots a memory budget pays for, rounded down to whole blocks."""
    return budget_bytes // config.kv_bytes_per_token(dtype) // block_size * block_size
