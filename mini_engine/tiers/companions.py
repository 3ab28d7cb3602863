"""Lesson 12. Companions of blocks: records that come and go with them, in a model that needs more than K and V.

A hybrid needs the state behind the last block (`states.py`), a model with windows the last blocks of its window groups
(lesson 15). Their records belong to blocks: a companion's key is made from its block's. What the tiers have behind the
request's prefix is then useful only up to a block whose companions they have as well.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from mini_engine.tiers.records import Kind, Record, Wanted
from mini_engine.tiers.store import Prefix
from mini_engine.tiers.tiers import Tiers


class Companions(Protocol):
    """The companions of blocks: `NO_COMPANIONS`, lesson 11's states, or lesson 15's windows."""

    def wanted(self, prefix: Prefix, start: int, blocks: list[Wanted]) -> list[Wanted]:
        """Return the records to ask for: those of `blocks`, which begin at index `start`, then companions."""
        ...

    def useful(self, wanted: Sequence[Wanted], records: Sequence[Record]) -> Sequence[Record]:
        """Return the records that are useful, of those found: the first of what was wanted."""
        ...

    def write(self, request_id: str, records: Sequence[Record]) -> None:
        """Copy companions to where the request needs them. It has room for all tokens that were found."""
        ...

    def new(
        self, request_id: str, prefix: Prefix, start: int, stop: int, is_kept: bool
    ) -> Sequence[tuple[int, Record]]:
        """Return records of what goes with the request's blocks start … stop - 1, unless host memory has them.

        Args:
            is_kept: the request's memories are at the end of block stop - 1, and worth saving.

        Returns:
            (index of the block, record) of each.
        """
        ...


class NoCompanions:
    """The companions in a model with K and V of every token: none."""

    def wanted(self, prefix: Prefix, start: int, blocks: list[Wanted]) -> list[Wanted]:
        """Return the blocks."""
        return blocks

    def useful(self, wanted: Sequence[Wanted], records: Sequence[Record]) -> Sequence[Record]:
        """Return all that were found."""
        return records

    def write(self, request_id: str, records: Sequence[Record]) -> None:
        """Do nothing."""

    def new(
        self, request_id: str, prefix: Prefix, start: int, stop: int, is_kept: bool
    ) -> Sequence[tuple[int, Record]]:
        """Return none."""
        return ()


NO_COMPANIONS = NoCompanions()


class CompanionMaker(NamedTuple):
    """The maker of companions, and their sizes, which tiers need before they are opened.

    num_bytes: that come back with any number of blocks. num_each: records that most blocks bring, their own included.
    """

    make: Callable[[Tiers], Companions] = lambda tiers: NO_COMPANIONS
    num_bytes: int = 0
    num_each: int = 1


def all_or_none(wanted: Sequence[Wanted], records: Sequence[Record]) -> Sequence[Record]:
    """Return the records if all that was wanted was found. A record that could not be used is gone by the next time."""
    return records if len(records) == len(wanted) else ()


def split(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Return the records of blocks, and those of companions."""
    blocks = [record for record in records if record.kind is Kind.KV]
    return blocks, [record for record in records if record.kind is not Kind.KV]
