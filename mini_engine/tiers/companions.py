"""Lesson 12. Companions of blocks: what a stored prefix needs besides them, in a model that keeps more than K and V.

A hybrid needs the state behind the last block (`states.py`), a model with windows the last blocks of its window groups
(lesson 15). A model may have several. Each item of a companion belongs to a block, and its record's key is made from
the block's. A prefix can be loaded only as far as every companion has what it needs there.
"""

import hashlib
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Protocol

from mini_engine.tiers.records import Bytes, Kind, Record, Wanted
from mini_engine.tiers.store import Prefix
from mini_engine.tiers.tiers import Tiers

LONG = 2**20  # blocks of a prefix of which every companion needs as much as it ever does


class Companion(Protocol):
    """One kind of items that go with blocks, at most one with each: lesson 11's states or lesson 15's windows.

    kind: of their records; no other companion of a model has it.
    only_at_end: a request has only the item of the last token that it has computed, like a state.
    """

    kind: Kind
    only_at_end: bool

    @property
    def payload_bytes(self) -> int:
        """Size of one item in bytes."""
        ...

    def needed(self, start: int, stop: int) -> range:
        """Return the blocks whose items a request lacks that holds blocks 0 … start - 1 and goes on after stop - 1.

        They are among start … stop - 1. An item that is needed for `stop` is needed for every smaller `stop` behind it.
        """
        ...

    def held(self, request_id: str, start: int, stop: int, at_end: bool) -> Sequence[int]:
        """Return which blocks' items the request's memory has, of those to save with blocks start … stop - 1.

        Args:
            at_end: the memory is at the end of block stop - 1, and worth saving.
        """
        ...

    def read(self, request_id: str, indices: Sequence[int]) -> Sequence[Bytes]:
        """Return copies of the items that the request has for these blocks."""
        ...

    def write(self, request_id: str, indices: Sequence[int], payloads: Sequence[Bytes]) -> None:
        """Copy items to where the request needs them. It has room for all tokens up to the last of these blocks."""


def num_each(companions: Iterable[Companion]) -> int:
    """Return how many records most blocks bring, their own included."""
    return 1 + sum(not one.only_at_end for one in companions)


def bytes_behind(companions: Iterable[Companion]) -> int:
    """Return the bytes of the items that come back with any number of blocks."""
    return sum(one.payload_bytes * len(one.needed(0, LONG)) for one in companions)


class CompanionRecords:
    """The records of all companions in the tiers."""

    def __init__(self, tiers: Tiers, companions: Sequence[Companion]) -> None:
        self.tiers, self.companions = tiers, companions

    def keys(self, prefix: Prefix) -> list[bytes]:
        """Return the keys of all records that a text may have, each block's followed by those of its items."""
        kinds = [one.kind for one in self.companions]
        return [key for block in prefix.keys[1:] for key in (block, *(item_key(block, kind) for kind in kinds))]

    def wanted(self, prefix: Prefix, start: int, blocks: list[Wanted]) -> list[Wanted]:
        """Return the records to ask for: of `blocks`, which begin at index `start`, the loadable ones, then items."""
        stop = self.last_end(prefix, start, start + len(blocks))
        items = [
            Wanted(*item_of(prefix, index, one.kind), one.payload_bytes, one.kind)
            for one in self.companions
            for index in one.needed(start, stop)
        ]
        return [*blocks[: stop - start], *items]

    def last_end(self, prefix: Prefix, start: int, stop: int) -> int:
        """Return the largest end in `start` … `stop` for which the tiers have every item that is needed there.

        The companions are asked in turn, each for a shorter prefix if it must be, until all accept the same one.
        """
        end, num_accepting = stop, 0
        for one in cycle(self.companions):
            before, end = end, self._end_of(one, prefix, start, end)
            num_accepting = num_accepting + 1 if end == before else 1
            if num_accepting == len(self.companions):
                break
        return end

    def _end_of(self, one: Companion, prefix: Prefix, start: int, stop: int) -> int:
        """Return the largest end that one companion accepts: where an item is missing, it ends before its block.

        From right to left, so no item is looked at twice.
        """
        end = index = stop
        while index > one.needed(start, end).start:
            index -= 1
            if item_key(prefix.keys[index + 1], one.kind) not in self.tiers:
                end = index
        return end

    def useful(self, wanted: Sequence[Wanted], records: Sequence[Record]) -> Sequence[Record]:
        """Return the useful records of those found, the first of `wanted`: with companions, all of them or none.

        A record that could not be used is gone by the next time.
        """
        return records if len(records) == len(wanted) or not self.companions else ()

    def write(self, request_id: str, start: int, stop: int, records: Sequence[Record]) -> None:
        """Copy items to where the request needs them to go on after block stop - 1."""
        for one in self.companions:
            if payloads := [record.payload for record in records if record.kind is one.kind]:
                one.write(request_id, one.needed(start, stop), payloads)

    def new(self, request_id: str, prefix: Prefix, start: int, stop: int, at_end: bool) -> list[tuple[int, Record]]:
        """Return records of what goes with the request's blocks start … stop - 1, unless host memory has them.

        Args:
            at_end: the request's memories are at the end of block stop - 1, and worth saving.

        Returns:
            (index of the block, record) of each.
        """
        found: list[tuple[int, Record]] = []
        for one in self.companions:
            held = [index for index in one.held(request_id, start, stop, at_end) if index < len(prefix)]
            new = [index for index in held if item_key(prefix.keys[index + 1], one.kind) not in self.tiers.host]
            payloads = one.read(request_id, new) if new else ()
            found += [
                (index, Record(*item_of(prefix, index, one.kind), payload, one.kind))
                for index, payload in zip(new, payloads, strict=True)
            ]
        return found


def item_key(key: bytes, kind: Kind) -> bytes:
    """Return the key of the item of this kind that goes with the block called `key`."""
    return hashlib.sha256(key + kind.name.lower().encode()).digest()


def item_of(prefix: Prefix, index: int, kind: Kind) -> tuple[bytes, bytes, bytes]:
    """Return the key, the block's key and the tokens of the item of this kind that goes with block `index`."""
    key, _, tokens = prefix.part(index)
    return item_key(key, kind), key, tokens
