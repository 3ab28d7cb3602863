"""Lesson 12. Records of states: a checkpoint's record is kept beside the block at whose end the state was taken.

Both have the same tokens behind them, so the name of one is made from the name of the other. What the tiers have behind
the tree's deepest checkpoint is useful as far as their own deepest one: K and V without the state at their end are not.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

from mini_engine.tiers.companions import all_or_none
from mini_engine.tiers.records import Bytes, Kind, Record, Wanted
from mini_engine.tiers.store import Prefix
from mini_engine.tiers.tiers import Tiers


class Slots(Protocol):
    """Copies whole slots between a state pool and payloads: `StateBytes`."""

    @property
    def payload_bytes(self) -> int: ...

    def read(self, slot: int) -> Bytes: ...

    def write(self, slot: int, payload: Bytes) -> None: ...


class StateRecords:
    """The states of a hybrid model: one goes with the last of several blocks.

    Args:
        tiers: where the records are. slots: copies states. slots_of: names a request's slots, its own first.
    """

    def __init__(self, tiers: Tiers, slots: Slots, slots_of: Callable[[str], Sequence[int]]) -> None:
        self.tiers, self.slots, self.slots_of = tiers, slots, slots_of

    def wanted(self, prefix: Prefix, start: int, blocks: list[Wanted]) -> list[Wanted]:
        """Return the blocks up to the deepest state that the tiers have, and that state."""
        for index in range(start + len(blocks) - 1, start - 1, -1):
            if state_key(prefix.keys[index + 1]) in self.tiers:
                return [*blocks[: index + 1 - start], wanted_state(prefix, index, self.slots.payload_bytes)]
        return []

    def useful(self, wanted: Sequence[Wanted], records: Sequence[Record]) -> Sequence[Record]:
        """Return all that was wanted, or nothing: the state comes last."""
        return all_or_none(wanted, records)

    def write(self, request_id: str, records: Sequence[Record]) -> None:
        """Copy the state into the request's slot."""
        [state] = records
        self.slots.write(self.slots_of(request_id)[0], state.payload)

    def new(self, request_id: str, prefix: Prefix, start: int, stop: int, is_kept: bool) -> list[tuple[int, Record]]:
        """Return the request's state if it is the one behind the last block, unless host memory has it."""
        if not is_kept or not 0 < stop <= len(prefix) or state_key(prefix.keys[stop]) in self.tiers.host:
            return []
        return [(stop - 1, state_record(prefix, stop - 1, self.slots.read(self.slots_of(request_id)[0])))]


def state_key(key: bytes) -> bytes:
    """Return the key of the state at the end of the block called `key`."""
    return hashlib.sha256(key + b"state").digest()


def state_record(prefix: Prefix, index: int, payload: Bytes) -> Record:
    """Return the record of the state at the end of block `index`."""
    key, _, tokens = prefix.part(index)
    return Record(state_key(key), key, tokens, payload, Kind.STATE)


def wanted_state(prefix: Prefix, index: int, payload_bytes: int) -> Wanted:
    """Return the record to ask for: the state at the end of block `index`."""
    key, _, tokens = prefix.part(index)
    return Wanted(state_key(key), key, tokens, payload_bytes, Kind.STATE)
