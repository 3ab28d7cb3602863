"""Lesson 11. Plans a step for a hybrid model, lesson 10's captured ones too: its plan and each request's state slot."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mini_engine.engine.runner import int64
from mini_engine.engine.scheduler import Chunk
from mini_engine.gpu.staging import Table
from mini_engine.hybrid.gdn_pool import PADDING_SLOT
from mini_engine.hybrid.store import HybridMeta, Run, Stage
from mini_engine.kv.block_tensor import ForwardMeta

SlotsOf = Callable[[str], Sequence[int]]


def add_slots(slots_of: SlotsOf, meta: ForwardMeta, chunks: Sequence[Chunk]) -> HybridMeta:
    """Add state slots to the plan of a step of these chunks.

    Args:
        slots_of: returns a running request's slots for its id: its own, and one more for each draft (`StateMemory`).
    """
    slots = [slots_of(chunk.request.id) for chunk in chunks]
    return with_states(meta, slots, [chunk.stop - chunk.start for chunk in chunks])


def with_states(meta: ForwardMeta, slots: Sequence[Sequence[int]], lengths: Sequence[int]) -> HybridMeta:
    """Add each sequence's state slots to a plan.

    Args:
        slots: one for each sequence, or one for each token of a sequence with drafts.
        lengths: the tokens that each sequence feeds.
    """
    singles, runs, start = [], [], 0
    stages: list[list[tuple[int, int, int]]] = []
    for own, length in zip(slots, lengths, strict=True):
        if length == len(own):
            singles.append((start, own[0]))
            for index, pair in enumerate(pairwise(own)):
                stages += [[]] if index == len(stages) else []
                stages[index].append((start + 1 + index, *pair))
        else:
            runs.append(Run(start, start + length, own[0]))
        start += length
    device = meta.positions.device
    rows, single_slots = (tensor(column, device) for column in (zip(*singles, strict=True) if singles else ((), ())))
    return HybridMeta(
        **vars(meta),
        single_rows=rows if runs or stages else None,
        single_slots=single_slots,
        runs=tuple(runs),
        stages=tuple(Stage(*(tensor(column, device) for column in zip(*stage, strict=True))) for stage in stages),
    )


def tensor(values: Sequence[int], device: torch.device) -> Tensor:
    """Return `values` as int64 on the device."""
    return int64(values).to(device) if values else torch.zeros(0, dtype=torch.int64, device=device)


class SlotRows:
    """The state slot of each row. Padding rows advance the state in slot 0, which is never handed out.

    Args:
        slots_of: returns a running request's slots for its id, its own first.
    """

    def __init__(self, slots_of: SlotsOf) -> None:
        self.slots_of = slots_of

    def tables(self, max_rows: int, max_blocks: int) -> list[Table]:
        """Return one tensor's shape and dtype: a slot for each row."""
        return [Table((max_rows,), torch.int64)]

    def fill(self, tensors: Sequence[Tensor], chunks: Sequence[Chunk], meta: ForwardMeta, size: int) -> None:
        """Copy in the slots, padding included."""
        slots = [self.slots_of(chunk.request.id)[0] for chunk in chunks]
        tensors[0][:size].copy_(int64(slots + [PADDING_SLOT] * (size - len(slots))))

    def complete(self, meta: ForwardMeta, tensors: Sequence[Tensor], size: int) -> HybridMeta:
        """Add the slots to a plan of decode rows."""
        return HybridMeta(**vars(meta), single_rows=None, single_slots=tensors[0][:size])
