"""Lesson 5. From a step's chunks to one packed forward pass, and back to the logits that choose tokens.

The plan is lesson 3's, made another way: a handful of array operations over all tokens at once, because a step may hold
thousands of tokens and Python must not look at each.
"""

from array import array
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from mini_engine.engine.scheduler import Chunk
from mini_engine.kv.block_tensor import NULL_BLOCK, ForwardMeta, KvPool
from mini_engine.model.qwen3 import Qwen3ForCausalLM


def plan_chunks(chunks: Sequence[Chunk], block_size: int, device: torch.device) -> ForwardMeta:
    """The plan of one step: chunk s feeds tokens start … stop - 1 of its request, and sees all tokens before stop."""
    starts = torch.tensor([chunk.start for chunk in chunks])
    stops = torch.tensor([chunk.stop for chunk in chunks])
    counts = stops - starts
    cu_seqlens_q = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    table = padded_table([chunk.blocks for chunk in chunks])
    owner = torch.repeat_interleave(counts)  # for each token, whose it is: 0 0 0 1 2 2 …
    positions = torch.arange(len(owner)) + (starts - cu_seqlens_q[:-1])[owner]
    blocks = table[owner, positions // block_size].long()
    return ForwardMeta(
        positions=positions.to(device),
        slot_mapping=(blocks * block_size + positions % block_size).to(device),
        cu_seqlens_q=cu_seqlens_q.int().to(device),
        seq_lens_kv=stops.int().to(device),
        block_table=table.to(device),
        block_size=block_size,
    )


def padded_table(rows: Sequence[list[int]]) -> Tensor:
    """`[S, max_blocks]` int32 from rows of different lengths, filled up with null blocks."""
    width = max(map(len, rows))
    flat = array("i")
    for row in rows:
        flat.fromlist(row + [NULL_BLOCK] * (width - len(row)))
    return torch.frombuffer(flat, dtype=torch.int32).view(len(rows), width)


class ModelRunner:
    """Runs the model over chunks, through one pool. It knows neither queues nor why a chunk is as long as it is."""

    def __init__(self, model: Qwen3ForCausalLM, pool: KvPool) -> None:
        self.model = model
        self.pool = pool
        self.block_size = pool.K[0].shape[1]

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """One forward pass.

        Returns:
            logits `[R, vocab_size]`, a row for each chunk that samples, in order.
        """
        meta = plan_chunks(chunks, self.block_size, self.pool.device)
        fed = list(chain.from_iterable(chunk.request.token_ids[chunk.start : chunk.stop] for chunk in chunks))
        ends = meta.cu_seqlens_q[1:].long() - 1
        samples = torch.tensor([chunk.samples for chunk in chunks], device=ends.device)
        return self.model(torch.tensor(fed, device=self.pool.device), self.pool, meta, rows=ends[samples])
