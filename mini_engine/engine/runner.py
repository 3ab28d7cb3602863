"""Lesson 5. Runs a step's chunks in one packed forward pass and returns the logits that choose tokens.

The plan is the same as in lesson 3 but built differently: with a few array operations over all tokens at once, because
a step may contain thousands of tokens, far too many for a Python loop.
"""

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mini_engine.engine.scheduler import Chunk
from mini_engine.kv.block_table import NULL_BLOCK
from mini_engine.kv.block_tensor import ForwardMeta


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
    block_table). All of them are on `device`. The meta names `block_size`, too.
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
    fed = chain.from_iterable(chunk.token_ids for chunk in chunks)
    ends = (cu_seqlens_q[1:] - 1).tolist()
    rows = [end for end, chunk in zip(ends, chunks, strict=True) if chunk.samples]
    return Step(int64(list(fed)).to(device), meta, torch.tensor(rows, dtype=torch.int64, device=device))


def int64(values: Sequence[int]) -> Tensor:
    """Return `values`, at least one, as an int64 tensor. For short lists 3 times as fast as torch.tensor."""
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


def plan_rows(chunks: Sequence[Chunk], block_size: int, device: torch.device) -> Step:
    """Plan a step with a row for each token whose logits are needed. Usually equal to `plan_step`."""
    step = plan_step(chunks, block_size, device)
    if all(chunk.num_logits == chunk.samples for chunk in chunks):
        return step
    return step._replace(rows=int64(logits_rows(chunks)).to(step.rows.device))


def logits_rows(chunks: Sequence[Chunk]) -> list[int]:
    """Return the rows of a step, over the tokens of all chunks, whose logits are needed."""
    rows, end = [], 0
    for chunk in chunks:
        end += chunk.stop - chunk.start
        rows += range(end - chunk.num_logits, end)
    return rows


Plan = Callable[[Sequence[Chunk], int, torch.device], Step]  # turns chunks into a step, as `plan_rows` does


class Group:
    """The processes that run a step together: this one alone, unless a subclass starts others."""

    @property
    def fault(self) -> str:
        """The reason no step can run any more; empty while steps can run."""
        return ""

    def running(self, step: Step) -> AbstractContextManager[None]:
        """Have the other processes run their shares of a step while the `with` block runs this one's."""
        return nullcontext()

    def close(self) -> None:
        """End the other processes."""


ALONE = Group()


class Runner(Protocol):
    """Runs chunks through a model whose K and V are in `pool`: by default `ModelRunner`."""

    model: Any
    pool: Any

    @property
    def fault(self) -> str:
        """The reason no step can run any more; empty while steps can run."""
        ...

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Run one forward pass; return logits `[R, vocab_size]`: each chunk's last `num_logits` rows, in order."""
        ...

    def close(self) -> None:
        """Release the resources that the runner holds outside this process."""
        ...


class ModelRunner:
    """Runs the model over chunks, with one pool. It knows nothing about queues or how chunk lengths are chosen.

    Args:
        plan: turns chunks into the model's input.
        group: the processes that share the model.
    """

    def __init__(self, model: Any, pool: Any, plan: Plan = plan_rows, group: Group = ALONE) -> None:
        self.model, self.pool, self.plan, self.group = model, pool, plan, group
        self.block_size, self.device = pool.K[0].shape[1], pool.device

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Run one forward pass; see `Runner.run`."""
        step = self.plan(chunks, self.block_size, self.device)
        with self.group.running(step):
            return self.model(step.token_ids, self.pool, step.meta, rows=step.rows)

    @property
    def fault(self) -> str:
        """The reason no step can run any more; empty while steps can run."""
        return self.group.fault

    def close(self) -> None:
        """End the other processes of the group, if there are any."""
        self.group.close()
