"""Lesson 12. The host tier: records in main memory, the least recently used dropped first."""

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from mini_engine.kv.connector import TierStats
from mini_engine.tiers.records import Record

PREFERRED = 0.75  # the most of it that `prefer` may keep from the others


class HostTier:
    """Records by key, at most `max_bytes` of them; thread-safe. With `max_bytes` 0 it holds nothing.

    Attributes:
        records: the least recently used first. preferred: the keys of those that go after the others (lesson 20).
        num_bytes: size of the records held. num_evicted: how many were dropped to stay within `max_bytes`.
        num_hits, num_misses: calls of `get` that found their record, and the others.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.records: OrderedDict[bytes, Record] = OrderedDict()
        self.preferred: OrderedDict[bytes, int] = OrderedDict()  # with their sizes
        self.preferred_bytes = 0
        self.num_bytes = self.num_evicted = self.num_hits = self.num_misses = 0
        self.mutex = Lock()

    def __len__(self) -> int:
        return len(self.records)

    def __contains__(self, key: bytes) -> bool:
        return key in self.records

    def get(self, key: bytes) -> Record | None:
        """Return the record and mark it as used now; None if it is not here."""
        with self.mutex:
            if record := self.records.get(key):
                self.records.move_to_end(key)
            self.num_hits += record is not None
            self.num_misses += record is None
            return record

    def put(self, record: Record) -> None:
        """Keep a record, dropping older ones if necessary. One larger than the tier is not kept."""
        with self.mutex:
            if record.key in self.records or record.num_bytes > self.max_bytes:
                return
            while self.num_bytes + record.num_bytes > self.max_bytes:
                self._drop()
            self.records[record.key] = record
            self.num_bytes += record.num_bytes

    def prefer(self, keys: Sequence[bytes]) -> None:
        """Mark records of a text, given from its beginning, as used now, and drop them after those of other texts.

        So preferred are at most `PREFERRED` of the tier: of what is more, the text preferred longest ago is not, and of
        one text its end. Keys without a record are ignored.
        """
        with self.mutex:
            for key in reversed(keys):
                if record := self.records.get(key):
                    self.records.move_to_end(key)
                    self._forget(key)
                    self.preferred[key] = record.num_bytes
                    self.preferred_bytes += record.num_bytes
            while self.preferred_bytes > self.max_bytes * PREFERRED:
                self._forget(next(iter(self.preferred)))

    def _drop(self) -> None:
        """Drop a record: the least recently used of those that are not preferred, if there is one."""
        if len(self.preferred) == len(self.records):
            self._forget(next(iter(self.preferred)))
        while (key := next(iter(self.records))) in self.preferred:
            self.records.move_to_end(key)  # it counts as used now, so it is not looked at again for long
        self.num_bytes -= self.records.pop(key).num_bytes
        self.num_evicted += 1

    def _forget(self, key: bytes) -> None:
        self.preferred_bytes -= self.preferred.pop(key, 0)

    def stats(self) -> TierStats:
        """Return the counts of events, for metrics."""
        events = {"hits": self.num_hits, "misses": self.num_misses, "evicted": self.num_evicted}
        return TierStats("host", self.num_bytes, events)

    def clear(self) -> None:
        """Drop everything."""
        with self.mutex:
            self.records.clear()
            self.preferred.clear()
            self.num_bytes = self.preferred_bytes = 0
