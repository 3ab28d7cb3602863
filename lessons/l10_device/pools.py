"""Lesson 10. Creates the pool, the allocator and the table of the device loop so that they fit each other.

Three things must be the same for all of them: the number of slots, the page size and the device. Names and parameters
are those of pymllm, without its `pin_memory`: only host memory can be pinned, and these tensors are on the device.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lessons.l10_device.req_to_token import ReqToTokenPool
from lessons.l10_device.slot_allocator import TokenToKVPoolAllocator
from lessons.l10_device.slot_pool import SlotPool
from mini_engine.base.errors import UserError
from mini_engine.kv.block_tensor import KvPool, KvShape


def no_kernel(*inputs) -> Tensor:
    """Stand in for the attention kernel of a pool that only stores: raises ValueError."""
    raise ValueError("this pool has no attention kernel; create it with one")


def make_full_attention_net_mem_pool(
    size: int,
    layer_num: int,
    k_head_num: int,
    k_head_dim: int,
    v_head_num: int | None = None,
    v_head_dim: int | None = None,
    *,
    page_size: int = 1,
    need_sort: bool = True,
    kernel: Callable[..., Tensor] = no_kernel,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> tuple[SlotPool, TokenToKVPoolAllocator]:
    """Return a pool for a model whose layers all keep every token, and the allocator of its slots.

    Args:
        size: slots for tokens; the padding page comes on top.
        v_head_num, v_head_dim: a value's heads and dimension; None for the key's.
        need_sort: hand out low slots first after a merge. kernel: a paged-attention kernel.

    Raises:
        UserError: `size` is not a positive multiple of `page_size`, or the pool does not fit in memory.
    """
    allocator = TokenToKVPoolAllocator(size, page_size, device=device, need_sort=need_sort)
    k_shape = k_head_num, k_head_dim
    v_shape = k_head_num if v_head_num is None else v_head_num, k_head_dim if v_head_dim is None else v_head_dim
    num_pages = size // page_size + 1
    blocks = KvPool(KvShape(layer_num, k_shape, v_shape), num_pages, page_size, kernel, dtype, device)
    return SlotPool(blocks), allocator


def make_req_to_token_pool(
    max_reqs: int, max_context_len: int, *, page_size: int = 1, device: str | torch.device = "cpu"
) -> ReqToTokenPool:
    """Return a table of `max_reqs` rows; each has room for `max_context_len` tokens, rounded up to whole pages.

    A request holds whole pages, so a row that ended in the middle of one could not hold its longest request.

    Raises:
        UserError: a number is less than 1.
    """
    if page_size < 1:
        raise UserError(f"page_size is {page_size}; it must be at least 1")
    return ReqToTokenPool(max_reqs, -(-max_context_len // page_size) * page_size, device)
