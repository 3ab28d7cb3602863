"""Lesson 11. States in lesson 10's device loop: a request's row in the table is its slot in the state pool.

A row starts with a state of zeros when it is handed out; padding rows, which are row 0, write their states into slot 0.
`generate_on_device` runs unchanged.
"""

from collections.abc import Sequence

from torch import Tensor

from lessons.l10_device.loop import RowMemory
from mini_engine.base.errors import UserError
from mini_engine.hybrid.gdn_pool import GdnPool
from mini_engine.hybrid.plan import with_states
from mini_engine.hybrid.store import HybridMeta
from mini_engine.kv.block_tensor import ForwardMeta


class RowStates(RowMemory):
    """A state for every row of the table."""

    def __init__(self, states: GdnPool) -> None:
        self.states = states

    def check(self, num_rows: int) -> None:
        """Raise UserError unless the pool has a working slot for every row."""
        if num_rows > self.states.max_reqs:
            raise UserError(
                f"the table has {num_rows} rows and the state pool {self.states.max_reqs} working slots; each row "
                "needs the slot with its number"
            )

    def begin(self, row: int) -> None:
        """Zero the state that the previous request left in the row."""
        self.states.reset_states([row])

    def complete(self, meta: ForwardMeta, rows: Tensor, lengths: Sequence[int] | None) -> HybridMeta:
        """Add the rows as state slots. A decode step needs no lengths, so nothing waits for the device."""
        if lengths is None:
            return HybridMeta(**vars(meta), single_rows=None, single_slots=rows)
        return with_states(meta, [[row] for row in rows.tolist()], lengths)
