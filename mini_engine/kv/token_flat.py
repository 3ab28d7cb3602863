"""Lesson 2. Token-flat paging: one pool of slots shared by all requests, handed out in blocks, read by gathering.

A slot holds K and V of one token, in every layer. A block is `block_size` consecutive slots, the unit of allocation.
Token i of a request lies in slot `block_id * block_size + offset`, where `block_id` is the request's block number
`i // block_size` and `offset` is `i % block_size`. A request's blocks can lie anywhere in the pool.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.attention.dense import causal_attention
from mini_engine.base.errors import UserError
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.store import Store


@dataclass(frozen=True)
class FlatMeta:
    """One step's plan.

    positions: `[T]` int64, each fed token's position in its sequence.
    slot_mapping: `[T]` int64, the slots this step's K and V are written to.
    kv_indices: `[T_kv]` int64, the slots of the history in order, this step's tokens included.
    is_prefill: true for a prompt, whose queries need a causal mask; the single query of a decode sees every key.
    """

    positions: Tensor
    slot_mapping: Tensor
    kv_indices: Tensor
    is_prefill: bool


class FlatKvPool(Store):
    """K and V of all requests, `[num_slots, H_kv, D]` for each layer. Does not know which request owns which slot."""

    def __init__(
        self,
        config: Qwen3Config,
        num_slots: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        shape = (num_slots, config.num_key_value_heads, config.head_dim)
        try:
            self.K = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
            self.V = [torch.empty_like(k) for k in self.K]
        except (RuntimeError, TypeError) as error:  # TypeError: not even 64 bits hold the size
            raise UserError(f"{num_slots} slots do not fit in memory; use fewer") from error

    @property
    def device(self) -> torch.device:
        """The pool's device; a plan's tensors must be on it."""
        return self.K[0].device

    @property
    def bytes(self) -> int:
        """Size of the whole pool in bytes, used or not."""
        return sum(x.nbytes for x in (*self.K, *self.V))

    def set_kv(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v `[T, H_kv, D]` into the slots `slot_mapping` `[T]` int64 of this layer, in place.

        Row i of k and v goes to slot `slot_mapping[i]`; T may be 0. Leave the check of slots to `check_slots`, which
        does not read those on a CUDA device.

        Raises:
            ValueError: the shapes do not match, or a slot is not in the pool. Nothing is written.
        """
        expected = (len(slot_mapping), *self.K[layer].shape[1:])
        if k.shape != expected or v.shape != expected:
            raise ValueError(
                f"k {tuple(k.shape)} and v {tuple(v.shape)} must both be {expected}, one row for each slot"
            )
        check_slots(slot_mapping, len(self.K[layer]))
        self.K[layer][slot_mapping] = k
        self.V[layer][slot_mapping] = v

    def attend(self, layer: int, q: Tensor, meta: FlatMeta) -> Tensor:
        """Copy the history from its slots `kv_indices`, in order, and attend from q `[T, H_q, D]` to the copy.

        The queries of a prefill are causal, the last ones of the history; the single query of a decode sees every key.
        Returns `[T, H_q, D]`.
        """
        k = self.K[layer][meta.kv_indices]
        v = self.V[layer][meta.kv_indices]
        return causal_attention(q, k, v) if meta.is_prefill else attend_to_all(q, k, v)


def check_slots(slot_mapping: Tensor, num_slots: int) -> None:
    """Reject slots outside 0 … num_slots - 1. Indexing alone would take -1 for the last slot.

    Slots on a CUDA device are not checked, because reading them would make every layer wait for the device. There, a
    slot past the end fails later as a device-side error, and a negative one overwrites another slot.

    Raises:
        ValueError: a slot on the CPU is out of bounds.
    """
    if slot_mapping.device.type != "cpu" or not len(slot_mapping):
        return
    lowest, highest = (int(slot) for slot in slot_mapping.aminmax())
    if lowest < 0 or highest >= num_slots:
        stray = lowest if lowest < 0 else highest
        raise ValueError(f"slot {stray} is not in the pool; its slots are 0 … {num_slots - 1}")


def attend_to_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention for a decode: one query `[1, H_q, D]` over keys and values `[T_kv, H_kv, D]`, without a mask."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1)


@dataclass
class FlatRequest:
    """One sequence: its tokens, the blocks it holds, and how much of its KV is written.

    `slot_indices` lists every slot of those blocks, so it can be longer than the sequence.
    `cur_len` counts the tokens whose KV is in the pool. After a prefill of T tokens it is T: the token just chosen has
    no KV yet.
    """

    prompt_ids: list[int]
    blocks: list[int] = field(default_factory=list)
    slot_indices: list[int] = field(default_factory=list)
    cur_len: int = 0
    output_ids: list[int] = field(default_factory=list)


def reserve(request: FlatRequest, allocator: BlockAllocator, target_len: int) -> None:
    """Ensure that `request` holds enough blocks for `target_len` tokens.

    Blocks are allocated whole: every slot of a new block is appended to `slot_indices`, in order, including slots past
    `target_len`. A no-op if the blocks it holds are enough.

    Raises:
        OutOfBlocks: the pool has fewer free blocks than are missing; nothing was changed.
    """
    size = allocator.block_size
    missing = -(-target_len // size) - len(request.blocks)
    new_blocks = allocator.alloc_blocks(max(0, missing))
    request.blocks.extend(new_blocks)
    for block in new_blocks:
        request.slot_indices.extend(range(block * size, (block + 1) * size))


def plan_prefill(request: FlatRequest, device: torch.device) -> FlatMeta:
    """Plan to feed the prompt tokens that have no KV yet. Their slots must be reserved.

    They attend to the prompt's earlier tokens too. The plan's tensors are on `device`; `request` is not modified.
    """
    length = len(request.prompt_ids)
    slots = torch.tensor(request.slot_indices[:length], dtype=torch.int64, device=device)
    positions = torch.arange(request.cur_len, length, device=device)
    return FlatMeta(positions, slot_mapping=slots[request.cur_len :], kv_indices=slots, is_prefill=True)


def plan_decode(request: FlatRequest, device: torch.device) -> FlatMeta:
    """Plan to feed one token, the last one chosen, at position `cur_len`. Its slot must be reserved.

    It attends to all tokens up to itself. The plan's tensors are on `device`; `request` is not modified.
    """
    slots = torch.tensor(request.slot_indices[: request.cur_len + 1], dtype=torch.int64, device=device)
    positions = torch.tensor([request.cur_len], device=device)
    return FlatMeta(positions, slot_mapping=slots[-1:], kv_indices=slots, is_prefill=False)


class PagedSequence:
    """A request as lesson 0's loop drives it: plan, run, commit."""

    def __init__(self, request: FlatRequest, pool: FlatKvPool, allocator: BlockAllocator) -> None:
        self.request, self.pool, self.allocator = request, pool, allocator

    def plan(self, token_ids: list[int]) -> FlatMeta:
        """Reserve slots for `token_ids` and plan to feed those whose KV is missing.

        Raises:
            OutOfBlocks: the pool is too full; nothing was changed.
            ValueError: the tokens belong to another sequence, or this sequence has already run; nothing was changed.
        """
        request = self.request
        expected = max(len(request.prompt_ids), request.cur_len + 1)
        if len(token_ids) != expected or token_ids[: len(request.prompt_ids)] != list(request.prompt_ids):
            raise ValueError("this sequence has already run, or has another prompt; make a new one for each answer")
        reserve(request, self.allocator, len(token_ids))
        request.output_ids = token_ids[len(request.prompt_ids) :]
        plan = plan_decode if request.cur_len >= len(request.prompt_ids) else plan_prefill
        return plan(request, self.pool.device)

    def commit(self, meta: FlatMeta) -> None:
        """Record that the step has run: the KV of every token it fed is now in the pool. `cur_len` remains an int."""
        self.request.cur_len += len(meta.positions)

    def release(self) -> None:
        """Return every block; the request holds nothing afterwards."""
        self.allocator.free(self.request.blocks)
        self.request.blocks, self.request.slot_indices, self.request.cur_len = [], [], 0


def pool_slots(config: Qwen3Config, dtype: torch.dtype, budget_bytes: int, block_size: int = 16) -> int:
    """Return the number of slots that fit in a memory budget, rounded down to whole blocks."""
    return budget_bytes // config.kv_bytes_per_token(dtype) // block_size * block_size
