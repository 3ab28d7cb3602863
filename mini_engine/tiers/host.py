"""Lesson 12. The host tier: records in main memory, the least recently used dropped first."""

from collections import OrderedDict
from threading import Lock

from mini_engine.kv.connector import TierStats
from mini_engine.tiers.records import Record


class HostTier:
    """Records by key, at most `max_bytes` of them; thread-safe. With `max_bytes` 0 it holds nothing.

    Attributes:
        num_bytes: size of the records held. num_evicted: how many were dropped to stay within `max_bytes`.
        num_hits, num_misses: calls of `get` that found their record, and the others.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.records: OrderedDict[bytes, Record] = OrderedDict()
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
                _, oldest = self.records.popitem(last=False)
                self.num_bytes -= oldest.num_bytes
                self.num_evicted += 1
            self.records[record.key] = record
            self.num_bytes += record.num_bytes

    def stats(self) -> TierStats:
        """Return the counts of events, for metrics."""
        events = {"hits": self.num_hits, "misses": self.num_misses, "evicted": self.num_evicted}
        return TierStats("host", self.num_bytes, events)

    def clear(self) -> None:
        """Drop everything."""
        with self.mutex:
            self.records.clear()
            self.num_bytes = 0
