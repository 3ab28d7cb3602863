"""Lesson 11. The state slots of lesson 10's captured steps: one more number for each row."""

from collections.abc import Sequence

from torch import Tensor

from mini_engine.engine.runner import int64
from mini_engine.engine.scheduler import Chunk
from mini_engine.hybrid.gdn_pool import PADDING_SLOT
from mini_engine.hybrid.runner import SlotsOf, shallow
from mini_engine.hybrid.store import HybridMeta
from mini_engine.kv.block_tensor import ForwardMeta


class SlotRows:
    """Where each row's state is. Rows of padding advance the state in slot 0, which is never handed out.

    Args:
        slots_of: names a running request's slots, by its id, its own first.
    """

    count = 1

    def __init__(self, slots_of: SlotsOf) -> None:
        self.slots_of = slots_of

    def rows(self, chunks: Sequence[Chunk], size: int) -> list[Tensor]:
        """Return the slots `[size]`, padding included."""
        slots = [self.slots_of(chunk.request.id)[0] for chunk in chunks]
        return [int64(slots + [PADDING_SLOT] * (size - len(slots)))]

    def complete(self, meta: ForwardMeta, rows: Sequence[Tensor]) -> HybridMeta:
        """Add the slots to a plan of decode rows."""
        return HybridMeta(**shallow(meta), single_rows=None, single_slots=rows[0])
