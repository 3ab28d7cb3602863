"""Lesson 12. States as companions of blocks: a checkpoint goes with the block at whose end the state was taken.

What the tiers have behind the tree's deepest checkpoint is useful as far as their own deepest one: K and V without the
state at their end are not.
"""

from collections.abc import Callable, Sequence

from mini_engine.tiers.records import Bytes, Kind
from mini_engine.tiers.store import Blocks


class StateCompanion:
    """The states of a hybrid model: one goes with the last of several blocks.

    Args:
        slots: copies whole slots of the state pool. slots_of: names a request's slots, its own first.
    """

    kind = Kind.STATE
    only_at_end = True

    def __init__(self, slots: Blocks, slots_of: Callable[[str], Sequence[int]]) -> None:
        self.slots, self.slots_of = slots, slots_of

    @property
    def payload_bytes(self) -> int:
        """Size of a state in bytes, all layers."""
        return self.slots.payload_bytes

    def needed(self, start: int, stop: int) -> range:
        """Return the last block, if there is any."""
        return range(max(start, stop - 1), stop)

    def held(self, request_id: str, start: int, stop: int, at_end: bool) -> Sequence[int]:
        """Return the last block if the request's state is the one behind it, even if its K and V are saved already."""
        return [stop - 1] if at_end and stop > 0 else []

    def read(self, request_id: str, indices: Sequence[int]) -> Sequence[Bytes]:
        """Return the request's state."""
        return self.slots.read(self._slot(request_id, indices))

    def write(self, request_id: str, indices: Sequence[int], payloads: Sequence[Bytes]) -> None:
        """Copy a state into the request's slot."""
        self.slots.write(self._slot(request_id, indices), payloads)

    def _slot(self, request_id: str, indices: Sequence[int]) -> list[int]:
        return [self.slots_of(request_id)[0] for _ in indices]
