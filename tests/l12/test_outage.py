"""Lesson 12. A disk that fails says so once, is tried again, and its figures are in /metrics."""

import errno
import logging
import os
import threading

import pytest

from mini_engine.tiers.background import Background
from mini_engine.tiers.disk import DiskTier
from mini_engine.tiers.outage import MOST_FAILURES, RETRY_SECONDS
from mini_engine.tiers.tiers import Tiers
from tests.shared.tier_items import SIZE, record, wanted

pytest.importorskip("prometheus_client", reason="needs the extra 'server'")

from prometheus_client.parser import text_string_to_metric_families

from mini_engine.server.metrics import Metrics, TierMetrics


class Clock:
    """A clock that stands still until it is set."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Disk:
    """Decides what `os.fsync` does."""

    def __init__(self, monkeypatch) -> None:
        self.is_full, self.num_tries, self.sync = True, 0, os.fsync
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, descriptor) -> None:
        self.num_tries += 1
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.sync(descriptor)


def test_after_a_minute_a_disk_that_failed_is_tried_again(tmp_path, monkeypatch):
    disk, clock = Disk(monkeypatch), Clock()
    tier = DiskTier(tmp_path, 10**6, clock=clock)
    for number in range(9):
        assert not tier.put(record(number))
    assert disk.num_tries == MOST_FAILURES, "three failures in a row, and the disk is left alone"
    clock.now += RETRY_SECONDS
    assert not tier.put(record(1)) and disk.num_tries == MOST_FAILURES + 1, "one try a minute"
    assert not tier.put(record(1)) and disk.num_tries == MOST_FAILURES + 1, "and not one more"
    disk.is_full = False
    clock.now += RETRY_SECONDS
    assert tier.put(record(1)) and tier.put(record(2)), "a disk that works again is used again"
    assert tier.counts["dropped"] == 9 - MOST_FAILURES + 1


def test_an_outage_is_logged_when_it_begins_and_when_it_ends(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    disk, clock = Disk(monkeypatch), Clock()
    tier = DiskTier(tmp_path, 10**6, clock=clock)
    for number in range(20):
        tier.put(record(number))
        clock.now += RETRY_SECONDS / 4
    said = [entry.getMessage() for entry in caplog.records]
    assert len(said) == 1 and str(tmp_path) in said[0] and "No space left" in said[0], f"one line, not {said}"
    disk.is_full = False
    clock.now += RETRY_SECONDS
    tier.put(record(1))
    tier.put(record(2))
    assert len(caplog.records) == 2, "and one line when it is over"


def scraped(manager) -> dict[tuple[str, str], float]:
    """Return the samples of /metrics about tiers: (tier, event) to count; the event of bytes is "bytes"."""
    metrics = Metrics()
    metrics.registry.register(TierMetrics(manager))
    families = text_string_to_metric_families(metrics.text().decode())
    samples = [sample for family in families for sample in family.samples if "_tier_" in sample.name]
    return {(sample.labels["tier"], sample.labels.get("event", "bytes")): sample.value for sample in samples}


class Manager:
    """What metrics know of a manager: its coordinator, and of that the statistics of its tiers."""

    def __init__(self, tiers) -> None:
        self.tiers, self.coordinator = tiers, self

    @property
    def stats(self):
        return self.tiers.stats()


def test_metrics_tell_what_happens_in_each_tier(tmp_path, monkeypatch):
    tiers = Tiers.of_size(tmp_path, 2 * SIZE, 10**6)
    for number in range(4):
        tiers.put(record(number))
    assert tiers.flush()
    tiers.get(wanted(3))  # from host memory
    tiers.get(wanted(0))  # from the disk: host memory has room for two
    path = tiers.disk.path(record(1).key)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    tiers.get(wanted(1))
    tiers.get(wanted(9))
    disk = Disk(monkeypatch)
    tiers.put(record(7))
    assert tiers.flush() and disk.num_tries == 1
    found = scraped(Manager(tiers))
    tiers.close()
    expected = {"hits": 1, "misses": 1, "damaged": 1, "forged": 0, "dropped": 0, "failed_writes": 1, "written": 4}
    assert {name: found["disk", name] for name in expected} == expected
    assert found["disk", "bytes"] == 3 * SIZE and found["host", "bytes"] == 2 * SIZE
    assert (found["host", "hits"], found["host", "misses"]) == (1, 3)


def test_what_a_full_queue_drops_is_counted(opened, tmp_path):
    tiers = opened(Tiers.of_size(tmp_path, 0, 10**6))
    tiers.writer.num_dropped = 5
    assert scraped(Manager(tiers))["disk", "dropped"] == 5


def test_an_engine_without_tiers_reports_none():
    from mini_engine.kv.manager import KvCacheManager

    assert scraped(KvCacheManager(4)) == {}


def test_closing_takes_no_longer_than_it_was_given():
    """A disk that hangs must not hold up the end of the process twice: while the queue is flushed, then its thread."""
    gate, waits = threading.Event(), []
    background = Background("hangs", lambda item: gate.wait(), 4)
    background.offer(1)
    join, background.thread.join = background.thread.join, waits.append
    background.close(0.05)
    gate.set()
    join()
    assert waits == [0.0], "flushing took all the time there was, so nothing is left to wait for the thread"


@pytest.mark.reference  # no task is about this
def test_blocks_that_no_tier_has_count_as_misses(engine_of, answers, tmp_path):
    engine = engine_of(kv_cache_dir=tmp_path, kv_always=True)
    answers(engine)  # to prompts of two whole blocks each, and 8 tokens
    found = scraped(engine.scheduler.manager)
    assert (found["host", "misses"], found["disk", "misses"]) == (6, 6), "what was computed had been looked for"
