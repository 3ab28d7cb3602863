"""Lesson 3. Several sequences in one forward pass: prefilled together, then decoded until the last one ends."""

from collections.abc import Collection, Sequence

import torch

from mini_engine.base.errors import UserError
from mini_engine.engine.loop import next_token
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.block_table import BlockTable
from mini_engine.kv.block_tensor import KvPool, PackedRequest, plan_packed, reserve_all
from mini_engine.model.causal_lm import CausalLM


@torch.inference_mode()
def generate_packed(
    model: CausalLM,
    pool: KvPool,
    allocator: BlockAllocator,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
) -> list[list[int]]:
    """Continue every prompt greedily, all in the same packed steps.

    Returns:
        the new tokens of each prompt: at most `max_new_tokens`, the last one possibly a token of `stop_ids`.

    Raises:
        UserError: the model cannot run a prompt, or the allocator belongs to another pool; nothing has run.
        OutOfBlocks: the pool is too small for all prompts at once; their blocks have been returned.
    """
    if allocator.block_size != pool.K[0].shape[1] or allocator.num_blocks > pool.num_blocks:
        raise UserError(
            f"the allocator has {allocator.num_blocks} blocks of {allocator.block_size} slots and the pool "
            f"{pool.num_blocks} of {pool.K[0].shape[1]}; use the same sizes for both"
        )
    for prompt_ids in prompts:
        model.config.check_prompt(prompt_ids, max_new_tokens)
    requests = [PackedRequest(list(prompt_ids), BlockTable(allocator)) for prompt_ids in prompts]
    running = list(requests) if max_new_tokens else []
    try:
        while running:
            step(model, pool, running, allocator.block_size)
            for request in running:
                if len(request.output_ids) == max_new_tokens or request.output_ids[-1] in stop_ids:
                    request.table.free()
            running = [request for request in running if request.table.blocks]
    finally:
        for request in running:
            request.table.free()
    return [request.output_ids for request in requests]


def step(model: CausalLM, pool: KvPool, requests: Sequence[PackedRequest], block_size: int) -> None:
    """Run one packed forward pass: it writes every request's missing KV and adds one token to each request."""
    reserve_all(requests)
    meta = plan_packed(requests, block_size, pool.device)
    fed = [token for request in requests for token in request.token_ids[request.cur_len :]]
    last_rows = meta.cu_seqlens_q[1:].long() - 1
    logits = model(torch.tensor(fed, device=pool.device), pool, meta, rows=last_rows)
    for request, row in zip(requests, logits, strict=True):
        request.cur_len = len(request.token_ids)
        request.output_ids.append(next_token(row))
