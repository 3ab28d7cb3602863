"""Lesson 12. The hierarchy below the pool: host memory before a disk, filled and read ahead in background threads.

    pool ── write ──> host tier ── write behind ──> disk tier
    pool <── copy ── host tier <──── prefetch ───── disk tier

A step never waits for the disk: it hands a block over, or drops it if the writer is behind, and it takes a block only
when that is in host memory.
"""

from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from mini_engine.kv.connector import TierStats
from mini_engine.tiers.background import Background
from mini_engine.tiers.disk import DiskTier
from mini_engine.tiers.host import HostTier
from mini_engine.tiers.records import Record, Wanted
from mini_engine.tiers.seal import seal_of

CLOSE_SECONDS = 30.0
MAX_WAITING = 64


class NoDisk:
    """The disk tier of an engine without a cache directory: empty."""

    def __contains__(self, key: bytes) -> bool:
        return False

    def get(self, wanted: Wanted) -> Record | None:
        """Find nothing."""
        return None

    def put(self, record: Record) -> bool:
        """Keep nothing."""
        return False

    def stats(self) -> list[TierStats]:
        """Return nothing: there is no such tier."""
        return []


class Tiers:
    """Records in host memory and on disk.

    Args:
        host: the first tier. disk: the second one.
        max_waiting: records that may wait to be written, and lookups that may wait to be read ahead.

    Attributes:
        num_found: records found so far, by tier: "host" and "disk".
        num_missing: blocks of admitted prompts that no tier was asked for: none has them, or it would not pay.
        feeders: threads that call `put`; `flush` waits for them first.
    """

    def __init__(self, host: HostTier, disk: DiskTier | NoDisk, max_waiting: int = MAX_WAITING) -> None:
        self.host, self.disk = host, disk
        self.writer: Background[Record] = Background("kv-tier-writer", disk.put, max_waiting)
        self.reader: Background[Wanted] = Background("kv-tier-reader", self._read, max_waiting)
        self.feeders: list[Background[Any]] = []
        self.coming: set[bytes] = set()
        self.asked: set[bytes] = set()
        self.mutex = Lock()
        self.num_found = {"host": 0, "disk": 0}
        self.num_missing = 0

    @classmethod
    def of_size(
        cls,
        directory: Path | None,
        host_bytes: int,
        disk_bytes: int,
        key_file: Path | None = None,
        max_waiting: int = MAX_WAITING,
    ) -> "Tiers":
        """Return tiers of these sizes; without a directory there is no disk tier.

        Raises:
            UserError: the directory cannot be created or the key file not read, or other users can use them.
        """
        disk = DiskTier(directory, disk_bytes, seal_of(key_file)) if directory and disk_bytes else NoDisk()
        return cls(HostTier(host_bytes), disk, max_waiting)

    def __contains__(self, key: bytes) -> bool:
        return key in self.host or key in self.disk

    def put(self, record: Record) -> None:
        """Keep a record in host memory, and write it to the disk later unless the writer is behind."""
        self.host.put(record)
        if record.key not in self.disk:
            self.writer.offer(record)

    def get(self, wanted: Wanted, read_disk: bool = True) -> Record | None:
        """Return a record from the first tier that has it, and keep it in host memory.

        Args:
            read_disk: also look on the disk, and wait for it.
        """
        self.asked.discard(wanted.key)
        record, tier = self.host.get(wanted.key), "host"
        if record is None and read_disk:
            record, tier = self.disk.get(wanted), "disk"
            if record is not None:
                self.host.put(record)
        if record is not None:
            self.num_found[tier] += 1
        return record

    def prefetch(self, wanted: Sequence[Wanted]) -> bool:
        """Have records that are only on the disk brought to host memory. Return whether any of them is on its way.

        Until `get` asks for it, a record is read ahead once: in a host tier that is too small, it may be gone again.
        """
        for one in wanted:
            with self.mutex:
                if one.key in self.asked or one.key in self.host or one.key not in self.disk:
                    continue
                self.asked.add(one.key)
                self.coming.add(one.key)
            if not self.reader.offer(one):  # the queue is full: ask again at the next step
                self._arrived(one)
                self.asked.discard(one.key)
                break
        return any(one.key in self.coming for one in wanted)

    def stats(self) -> list[TierStats]:
        """Return the statistics of each tier, for metrics."""
        host = self.host.stats().plus(misses=self.num_missing)
        disk = [tier.plus(misses=self.num_missing, dropped=self.writer.num_dropped) for tier in self.disk.stats()]
        return [host, *disk]

    def flush(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Wait until everything handed over is written. Return whether it is."""
        return all(thread.flush(seconds) for thread in (*self.feeders, self.writer))

    def close(self) -> None:
        """Write what is waiting and end the threads."""
        self.reader.close(0.0)
        for thread in (*self.feeders, self.writer):
            thread.close(CLOSE_SECONDS)

    def _read(self, wanted: Wanted) -> None:
        try:
            if record := self.disk.get(wanted):
                self.host.put(record)
        finally:
            self._arrived(wanted)

    def _arrived(self, wanted: Wanted) -> None:
        with self.mutex:
            self.coming.discard(wanted.key)
