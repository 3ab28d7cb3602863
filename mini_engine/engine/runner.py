"""Lesson 5. Runs a step's chunks in one packed forward pass and returns the logits that choose tokens.

The plan is the same as in lesson 3 but built differently: with a few array operations over all tokens at once, because
a step may contain thousands of tokens, far too many for a Python loop.
"""

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from mini_engine.engine.prompt_logprobs import prompt_rows
from mini_engine.engine.scheduler import Chunk
from mini_engine.kv.block_table import NULL_BLOCK
from mini_engine.kv.block_tensor import ForwardMeta, KvPool
from mini_engine.model.qwen3 import Qwen3ForCausalLM


class Step(NamedTuple):
    """The model's input for one step.

    token_ids: `[T]` int64, the tokens of all chunks, one chunk after another.
    meta: their plan; sequence s is chunk s.
    rows: `[R]` int64, the rows whose logits are needed: the last one of each chunk that samples.
    """

    token_ids: Tensor
    meta: ForwardMeta
    rows: Tensor


def plan_step(chunks: Sequence[Chunk], block_size: int, device: torch.device) -> Step:
    """Plan one packed step. Chunk s feeds tokens start … stop - 1 of its request and attends to all tokens before stop.

    Loops in Python run over chunks; everything per token is computed by array operations. A tensor that indexes is
    int64 (token_ids, positions, slot_mapping, rows); the kernel's tables are int32 (cu_seqlens_q, seq_lens_kv,
    block_table). All of them are on `device`.
    """
    starts = int64([chunk.start for chunk in chunks])
    stops = int64([chunk.stop for chunk in chunks])
    cu_seqlens_q = torch.zeros(len(chunks) + 1, dtype=torch.int64)
    torch.cumsum(stops - starts, 0, out=cu_seqlens_q[1:])
    owner = torch.repeat_interleave(stops - starts)  # the chunk of each token: 0 0 0 1 2 2 …
    positions = torch.arange(len(owner)) + (starts - cu_seqlens_q[:-1])[owner]
    table = padded_table([chunk.blocks for chunk in chunks])
    index = positions // block_size
    meta = ForwardMeta(
        positions=positions.to(device),
        slot_mapping=(positions + (table[owner, index] - index) * block_size).to(device),
        cu_seqlens_q=cu_seqlens_q.int().to(device),
        seq_lens_kv=stops.int().to(device),
        block_table=table.to(device),
        block_size=block_size,
    )
    fed = chain.from_iterable(chunk.request.token_ids[chunk.start : chunk.stop] for chunk in chunks)
    ends = (cu_seqlens_q[1:] - 1).tolist()
    rows = [end for end, chunk in zip(ends, chunks, strict=True) if chunk.samples]
    return Step(int64(list(fed)).to(device), meta, torch.tensor(rows, dtype=torch.int64, device=device))


def int64(values: Sequence[int]) -> Tensor:
    """Return `values`, at least one, as a tensor. For short lists it is 3 times as fast as torch.tensor."""
    return torch.frombuffer(array("q", values), dtype=torch.int64)


def padded_table(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return `[S, max_blocks]` int32 from rows of different lengths, padded with null blocks."""
    width = max(map(len, rows))
    nulls = array("i", [NULL_BLOCK]) * width
    flat = array("i")
    for row in rows:
        flat.extend(row)
        flat.extend(nulls[len(row) :])
    return torch.frombuffer(flat, dtype=torch.int32).view(len(rows), width)


def with_prompt_rows(step: Step, chunks: Sequence[Chunk]) -> Step:
    """Return the step with a row for each token of the chunks that need them all."""
    if not any(chunk.request.tells_prompt for chunk in chunks):
        return step
    return step._replace(rows=int64(prompt_rows(chunks)).to(step.rows.device))


class ModelRunner:
    """Runs the model over chunks, with one pool. It knows nothing of queues or of how chunk lengths are chosen."""

    def __init__(self, model: Qwen3ForCausalLM, pool: KvPool) -> None:
        self.model = model
        self.pool = pool
        self.block_size = pool.K[0].shape[1]

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Run one forward pass; return logits `[R, vocab_size]`, one row for each chunk that samples, in order.

        A chunk of a request that asks for its prompt's log probabilities has a row for each of its tokens instead.
        """
        step = with_prompt_rows(plan_step(chunks, self.block_size, self.pool.device), chunks)
        return self.model(step.token_ids, self.pool, step.meta, rows=step.rows)

    @property
    def fault(self) -> str:
        """Why no step can run any more; empty as long as one can, here always."""
        return ""

    def close(self) -> None:
        """Release what the runner holds outside this process: nothing here, other ranks in lesson 13."""
