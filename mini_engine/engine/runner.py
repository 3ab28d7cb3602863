"""Lesson 5. Runs a step's chunks in one packed forward pass and returns the logits that choose tokens.

The plan is the same as in lesson 3 but built differently: in flat arrays that take many numbers at once, because a step
may contain thousands of tokens, far too many for a Python loop.
"""

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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

    Loops in Python run over chunks and the blocks that they write; an `array` takes the tokens of a chunk, and the
    slots of a block, in one call. A tensor that indexes is int64 (token_ids, positions, slot_mapping, rows); the
    kernel's tables are int32 (cu_seqlens_q, seq_lens_kv, block_table). All of them are on `device`. The meta names
    `block_size`, too.
    """
    token_ids, positions, slots = array("q"), array("q"), array("q")
    cu_seqlens_q, stops, rows = array("i", [0]), array("i"), []
    for chunk in chunks:
        start, stop = chunk.start, chunk.stop
        token_ids += array("q", chunk.token_ids)
        positions.extend(range(start, stop))
        for index in range(start // block_size, -(-stop // block_size)):
            shift = (chunk.blocks[index] - index) * block_size  # from a token's position to its slot
            first, end = max(start, index * block_size), min(stop, (index + 1) * block_size)
            slots.extend(range(first + shift, end + shift))
        cu_seqlens_q.append(len(positions))
        stops.append(stop)
        if chunk.samples:
            rows.append(len(positions) - 1)
    meta = ForwardMeta(
        positions=tensor(positions).to(device),
        slot_mapping=tensor(slots).to(device),
        cu_seqlens_q=tensor(cu_seqlens_q).to(device),
        seq_lens_kv=tensor(stops).to(device),
        block_table=padded_table([chunk.blocks for chunk in chunks]).to(device),
        block_size=block_size,
    )
    return Step(tensor(token_ids).to(device), meta, torch.tensor(rows, dtype=torch.int64, device=device))


def tensor(numbers: array) -> Tensor:
    """Return the numbers, at least one, as a tensor in the array's memory: int64 for array("q"), int32 for "i"."""
    return torch.frombuffer(numbers, dtype=torch.int64 if numbers.typecode == "q" else torch.int32)


def int64(values: Sequence[int]) -> Tensor:
    """Return `values`, at least one, as an int64 tensor. For short lists 3 times as fast as torch.tensor."""
    return tensor(array("q", values))


def padded_table(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return `[S, max_blocks]` int32 from rows of different lengths, padded with null blocks."""
    width = max(map(len, rows))
    nulls = array("i", [NULL_BLOCK]) * width
    flat = array("i")
    for row in rows:
        flat.extend(row)
        flat.extend(nulls[len(row) :])
    return tensor(flat).view(len(rows), width)


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
