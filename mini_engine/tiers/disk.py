"""Lesson 12. The disk tier: one file per record, in a directory that outlives the process and may be shared.

A file is written under a temporary name, synced and renamed, so a reader sees a whole record or none, whenever the
writer is killed. Names are keys, and equal keys mean equal records: two writers of one record do no harm.
"""

import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from threading import Lock

from mini_engine.kv.connector import TierStats
from mini_engine.tiers.files import OWNERS_DIRECTORY, create, is_abandoned, make_private, read_regular
from mini_engine.tiers.keys import KEY_BYTES
from mini_engine.tiers.outage import Outage
from mini_engine.tiers.records import CRC, HEADER, BadRecord, Record, Wanted, unpack
from mini_engine.tiers.seal import NO_SEAL, Seal

SUFFIX = ".kv"
UNFINISHED = ".tmp"
ABANDONED_SECONDS = 3600.0  # where the system cannot say whether a file is still being written
UNTRUSTED = ("truncated", "version", "damaged", "foreign", "irregular")


class DiskTier:
    """Records as files in `directory`, at most `max_bytes` of them, the least recently used removed first.

    A directory that cannot be written is read only: what it holds is still found. An error of the disk is counted and
    never raised; after three failed writes there is one try a minute.

    Args:
        seal: makes and checks the tag behind each record. clock: returns seconds, for the time between tries.

    Attributes:
        num_bytes: size of the records' files known to this process. num_unfinished: of files that are being written.
        counts: events by name: "hits", "misses", "written", "evicted", "dropped" (not written, in an outage),
            "failed writes", "failed reads", and each reason of a BadRecord.

    Raises:
        UserError: `directory` is not a directory and cannot be made one, or other users can use it.
    """

    def __init__(
        self, directory: Path, max_bytes: int, seal: Seal = NO_SEAL, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.directory, self.max_bytes, self.seal = directory, max_bytes, seal
        make_private(directory)
        self.outage = Outage(directory, clock)
        self.counts: Counter[str] = Counter()
        self.mutex = Lock()
        self.names = count()
        self.scan()

    def __len__(self) -> int:
        return len(self.sizes)

    def __contains__(self, key: bytes) -> bool:
        return key in self.sizes

    def scan(self) -> None:
        """Look up again which records the directory holds, oldest first; remove what a killed writer left behind."""
        found = sorted(self._files(), key=lambda entry: entry[0])
        unfinished = sum(self._unfinished())
        with self.mutex:
            self.num_unfinished = unfinished
            self.sizes: OrderedDict[bytes, int] = OrderedDict((key, size) for _, key, size in found)
            self.num_bytes = sum(self.sizes.values())

    def get(self, wanted: Wanted) -> Record | None:
        """Return the wanted record; None if there is none, or none that can be trusted, and that file is removed."""
        path = self.path(wanted.key)
        try:
            record = wanted.parse(self.seal.opened(read_regular(path, self._size_of(wanted))))
        except FileNotFoundError:
            self._count("misses")
            self._forget(wanted.key)
            return None
        except BadRecord as error:
            self._count(error.reason)
            self._remove(wanted.key)
            return None
        except OSError:
            self._count("failed reads")
            return None
        self._count("hits")
        with suppress(OSError):  # a read-only directory keeps its order
            os.utime(path)
        return record

    def put(self, record: Record) -> bool:
        """Write a record unless it is there. Return whether it is there now."""
        if record.key in self.sizes:
            return True
        num_bytes = record.num_bytes + self.seal.num_bytes
        if num_bytes > self.max_bytes:
            return False
        if not self.outage.should_try:
            self.counts["dropped"] += 1
            return False
        self._make_room(num_bytes)
        path = self.path(record.key)
        unfinished = path.with_name(f"{path.stem}.{os.getpid()}-{next(self.names)}{UNFINISHED}")
        try:
            path.parent.mkdir(OWNERS_DIRECTORY, exist_ok=True)
            parts = record.packed()
            with create(unfinished) as file:
                file.writelines([*parts, self.seal.tag(parts)])
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        except OSError as error:
            self.counts["failed writes"] += 1
            self.outage.failed(error)
            _unlink(unfinished)
            return False
        self.outage.succeeded()
        with self.mutex:
            self.sizes[record.key] = num_bytes
            self.num_bytes += num_bytes
            self.counts["written"] += 1
        return True

    def verify(self, remove: bool = False) -> Iterator[tuple[Path, str]]:
        """Read every record; yield the files that cannot be trusted and why, removing them if `remove` is set."""
        for key, size in list(self.sizes.items()):
            path = self.path(key)
            try:
                reason = "" if unpack(self.seal.opened(read_regular(path, size))).key == key else "foreign"
            except BadRecord as error:
                reason = error.reason
            except OSError as error:
                reason = error.strerror or "unreadable"
            if reason:
                yield path, reason
                if remove:
                    self._remove(key)

    def clear(self) -> int:
        """Remove every record; return how many there were."""
        self.scan()
        keys = list(self.sizes)
        for key in keys:
            self._remove(key)
        return len(keys)

    def stats(self) -> list[TierStats]:
        """Return the counts of events, for metrics."""
        counts = self.counts
        names = ("hits", "misses", "forged", "dropped", "evicted", "written", "failed writes", "failed reads")
        events = {name: counts[name] for name in names} | {"damaged": sum(counts[reason] for reason in UNTRUSTED)}
        return [TierStats("disk", self.num_bytes, events)]

    def path(self, key: bytes) -> Path:
        """Return the file of a record. 256 folders keep each of them short."""
        name = key.hex()
        return self.directory / name[:2] / (name + SUFFIX)

    def _count(self, event: str) -> None:
        with self.mutex:  # the engine's thread and the one that reads ahead
            self.counts[event] += 1

    def _size_of(self, wanted: Wanted) -> int:
        return HEADER.size + len(wanted.tokens) + wanted.payload_bytes + CRC.size + self.seal.num_bytes

    def _make_room(self, num_bytes: int) -> None:
        """Remove the oldest records until `num_bytes` more fit. Other processes' records are counted first."""
        if self.num_bytes + self.num_unfinished + num_bytes <= self.max_bytes:
            return
        self.scan()
        while self.sizes and self.num_bytes + self.num_unfinished + num_bytes > self.max_bytes:
            self._remove(next(iter(self.sizes)))
            self.counts["evicted"] += 1

    def _remove(self, key: bytes) -> None:
        _unlink(self.path(key))
        self._forget(key)

    def _forget(self, key: bytes) -> None:
        with self.mutex:
            self.num_bytes -= self.sizes.pop(key, 0)

    def _files(self) -> Iterator[tuple[float, bytes, int]]:
        """Yield (last use, key, size) of each record's file."""
        for path in self.directory.glob(f"??/*{SUFFIX}"):
            if (key := key_in(path.stem)) and (found := _status(path)):
                yield found.st_mtime, key, found.st_size

    def _unfinished(self) -> Iterator[int]:
        """Remove what killed writers, or a killed measurement, left behind; yield the sizes of what stays."""
        for path in chain(*(self.directory.glob(where + UNFINISHED) for where in ("*", "??/*"))):
            if found := _status(path):
                is_old = time.time() - found.st_mtime > ABANDONED_SECONDS
                if not ((is_old or is_abandoned(path)) and _unlink(path)):
                    yield found.st_size


def key_in(name: str) -> bytes | None:
    """Return the key that a file is named after, None if it is named after something else."""
    try:
        key = bytes.fromhex(name)
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES else None


def _status(path: Path) -> os.stat_result | None:
    with suppress(OSError):  # another process removed it
        return path.lstat()


def _unlink(path: Path) -> bool:
    with suppress(OSError):  # read-only, or open in another process on Windows: it stays
        path.unlink(missing_ok=True)
        return True
    return False
