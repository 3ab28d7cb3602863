"""Lesson 4. For its smoke script: packed steps, as in lesson 3, with our sampler or transformers' distributions."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from scripts.smoke.hugging_face import hf_processors
from scripts.smoke.run import Outcome

import torch

from lessons.l4_sampler.row import Row
from mini_engine.attention.registry import load_kernel
from mini_engine.engine.sampled import Sampled
from mini_engine.engine.sampler import draw_tokens, process, sample
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.block_table import BlockTable
from mini_engine.kv.block_tensor import KvPool, PackedRequest, plan_packed, reserve_all

SIZE = 16  # slots in a block


@torch.inference_mode()
def run_packed(
    model: Any,
    jobs: Sequence[tuple[list[int], SamplingParams]],
    args: argparse.Namespace,
    sampler: Callable[..., Any] = sample,
) -> Outcome:
    """Answer all (prompt, params) of `jobs` in packed steps. Each ends according to its params."""
    num_blocks = 1 + sum(-(-(len(prompt) + params.max_tokens) // SIZE) for prompt, params in jobs)
    dtype, eos = model.dtype, model.config.eos_token_ids
    pool = KvPool(model.config, num_blocks, SIZE, load_kernel("auto", args.device, dtype), dtype, args.device)
    allocator = BlockAllocator(num_blocks, SIZE)
    pairs = []
    for prompt, params in jobs:
        request = PackedRequest(list(prompt), BlockTable(allocator))
        pairs.append((request, Row(params, request.prompt_ids, request.output_ids, params.stop_ids(eos))))
    running = pairs
    while running:
        logits = forward(model, pool, [request for request, _ in running])
        for (request, row), chosen in zip(running, sampler(logits, [row for _, row in running]), strict=True):
            request.output_ids.append(chosen.token_id)
            if row.params.finish_reason(row.output_ids, row.stop_ids):
                request.table.free()
        running = [(request, row) for request, row in running if request.table.blocks]
    kv = {"layout": "block-tensor", "bytes": pool.bytes, "blocks": num_blocks - 1, "block_size": SIZE}
    return Outcome([request.output_ids for request, _ in pairs], kv | {"free_at_end": allocator.num_free})


def forward(model: Any, pool: KvPool, requests: Sequence[PackedRequest]) -> torch.Tensor:
    """Run one packed pass, writing all missing KV. Returns the logits `[R, vocab]` of each request's next token."""
    reserve_all(requests)
    meta = plan_packed(requests, SIZE, pool.device)
    fed = [token for request in requests for token in request.token_ids[request.cur_len :]]
    for request in requests:
        request.cur_len = len(request.token_ids)
    return model(torch.tensor(fed, device=pool.device), pool, meta, rows=meta.cu_seqlens_q[1:].long() - 1)


class FromTransformers:
    """Chooses for one request from transformers' distributions. `unequal`: the steps in which ours differ."""

    def __init__(self) -> None:
        self.unequal = []

    def __call__(self, logits, rows):
        row, logits = rows[0], logits.float()
        context = torch.tensor([[*row.prompt_ids, *row.output_ids]], device=logits.device)
        theirs, ours = hf_processors(row.params)(context, logits), process(logits.clone(), rows)
        if not (torch.equal(ours.isinf(), theirs.isinf()) and torch.allclose(ours, theirs, rtol=1e-5)):
            self.unequal.append(len(row.output_ids))
        token = theirs.argmax(dim=-1) if row.params.is_greedy else draw_tokens(theirs, rows)
        return [Sampled(int(token), None)]
