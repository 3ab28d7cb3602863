"""Lesson 11. The bookkeeping of a state pool: the free list of checkpoint slots. No tensors, no torch."""

from collections.abc import Sequence

from mini_engine.base.errors import UserError


class TrackSlots:
    """The free list of checkpoint slots, max_reqs + 1 … max_reqs + max_track_slots.

    On its own it has no states: copying and resetting do nothing. GdnPool adds the tensors.

    Raises:
        UserError: max_reqs is less than 1, or max_track_slots is negative.
    """

    def __init__(self, max_reqs: int, max_track_slots: int = 0) -> None:
        if max_reqs < 1 or max_track_slots < 0:
            raise UserError(
                f"max_reqs is {max_reqs} and max_track_slots {max_track_slots}; use at least 1 request and 0 or more "
                "checkpoints"
            )
        self.max_reqs = max_reqs
        self.max_track_slots = max_track_slots
        self.free_track_slots = list(range(self.num_slots - 1, max_reqs, -1))  # allocated from the end
        self.held_track_slots: set[int] = set()

    @property
    def num_slots(self) -> int:
        """The number of slots: the padding slot, one for each request, and the checkpoints."""
        return 1 + self.max_reqs + self.max_track_slots

    def alloc_track_slot(self) -> int | None:
        """Allocate a checkpoint slot; None if all are in use. Its states are uninitialized."""
        if not self.free_track_slots:
            return None
        slot = self.free_track_slots.pop()
        self.held_track_slots.add(slot)
        return slot

    def free_track_slot(self, slot: int) -> None:
        """Return a checkpoint slot to the free list.

        Raises:
            ValueError: the slot is not allocated: a working slot, already freed, or not in the pool.
        """
        if slot not in self.held_track_slots:
            raise ValueError(f"slot {slot} is not a checkpoint in use; it was already freed or never allocated")
        self.held_track_slots.remove(slot)
        self.free_track_slots.append(slot)

    def reset_states(self, slots: Sequence[int]) -> None:
        """Zero the states of these slots. Without tensors, do nothing."""

    def copy_states(self, src_index: int, dst_index: int) -> None:
        """Copy the states of one slot to another. Without tensors, do nothing."""
