"""Lesson 11. The state slots of lesson 10's captured steps: one more number for each row."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mini_engine.engine.runner import int64
from mini_engine.engine.scheduler import Chunk
from mini_engine.gpu.staging import Table
from mini_engine.hybrid.gdn_pool import PADDING_SLOT
from mini_engine.hybrid.plan import SlotsOf
from mini_engine.hybrid.store import HybridMeta
from mini_engine.kv.block_tensor import ForwardMeta


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
