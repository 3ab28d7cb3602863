"""Lesson 12. The tiers stay within their sizes, survive crashes and full disks, and never make the engine wait."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.base.errors import UserError
from mini_engine.tiers import disk
from mini_engine.tiers.background import Background
from mini_engine.tiers.disk import ABANDONED_SECONDS, DiskTier
from mini_engine.tiers.files import create
from mini_engine.tiers.host import HostTier
from mini_engine.tiers.outage import MOST_FAILURES
from mini_engine.tiers.tiers import Tiers
from tests.shared.tier_items import SIZE, record, wanted

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0  # seconds after which a test gives up


def test_a_record_that_was_used_outlives_one_that_came_later():
    tier = HostTier(2 * SIZE)
    tier.put(record(1))
    tier.put(record(2))
    assert tier.get(record(1).key), "both fit"
    tier.put(record(3))
    kept = [number for number in (1, 2, 3) if record(number).key in tier]
    assert kept == [1, 3], "record 1 came first, but record 2 is the least recently used: it goes"
    assert tier.num_evicted == 1
    tier.put(record(3))
    assert (len(tier), tier.num_bytes) == (2, 2 * SIZE), "what is there already is not counted twice"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=60), st.integers(0, 3))
def test_the_host_tier_keeps_the_most_recently_used_within_its_size(calls, room):
    tier, model = HostTier(room * SIZE + SIZE // 2), []
    for is_put, number in calls:
        key = record(number).key
        if is_put:
            tier.put(record(number))
            if number not in model:
                model = [*model, number][-room:] if room else []
        else:
            assert (tier.get(key) is not None) == (number in model), "the least recently used record goes first"
            if number in model:
                model = [*(n for n in model if n != number), number]
        kept = {number for number in range(5) if record(number).key in tier}
        assert kept == set(model), "the least recently used record goes first, and no other"
        assert len(tier) == len(model) and tier.num_bytes == len(model) * SIZE <= tier.max_bytes


def test_the_disk_tier_removes_the_least_recently_used_files(tmp_path):
    tier = DiskTier(tmp_path, 3 * SIZE)
    for number in (1, 2, 3):
        tier.put(record(number))
        os.utime(tier.path(record(number).key), (number, number))
    assert tier.get(wanted(1)) is not None
    tier.put(record(4))
    kept = [number for number in (1, 2, 3, 4) if tier.get(wanted(number))]
    assert kept == [1, 3, 4], "record 1 was used after record 2, so 2 goes"
    assert tier.num_bytes == 3 * SIZE and tier.counts["evicted"] == 1


def test_two_processes_on_one_directory_see_each_others_records_and_share_the_limit(tmp_path):
    one, other = DiskTier(tmp_path, 3 * SIZE), DiskTier(tmp_path, 3 * SIZE)
    for number in range(3):
        one.put(record(number))
    assert other.get(wanted(2)) is not None, "a file written by another process is found by its name"
    for number in range(3, 6):
        other.put(record(number))
    other.put(record(6))
    assert len(list(tmp_path.glob("??/*.kv"))) <= 4, "files of both processes count"
    assert one.get(wanted(0)) is None and record(0).key not in one, "a file that another process removed is a miss"


def test_what_cannot_be_trusted_is_a_counted_miss_and_is_removed(tier):
    path = tier.path(record(1).key)
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)
    assert tier.get(wanted(1)) is None and tier.counts["damaged"] == 1
    assert not path.exists() and tier.num_bytes == 0
    assert tier.put(record(1)) and tier.get(wanted(1)), "the next writer may write it again"


def test_a_full_disk_is_counted_and_given_up_after_a_few_tries(tier, tmp_path, monkeypatch):
    def no_space(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    assert not any(tier.put(record(number)) for number in range(2, 10))
    assert tier.counts["failed writes"] == MOST_FAILURES, "no more is tried after that"
    assert not list(tmp_path.glob("??/*.tmp")), "nothing half written stays"
    assert tier.get(wanted(1)) is not None, "what is there is still found"


def test_a_writer_that_stops_in_the_middle_leaves_no_record(tmp_path, monkeypatch):
    def stopped(descriptor):
        raise KeyboardInterrupt

    tier = DiskTier(tmp_path, 10**6)
    monkeypatch.setattr(os, "fsync", stopped)
    with pytest.raises(KeyboardInterrupt):
        tier.put(record(1))
    assert not list(tmp_path.glob("??/*.kv")), "half a record must not have a record's name"


def test_a_directory_that_cannot_be_written_is_read_only(tmp_path, monkeypatch):
    DiskTier(tmp_path, 10**6).put(record(1))

    def refuse(*arguments, **options):
        raise PermissionError(errno.EROFS, "Read-only file system")

    for name in ("utime", "fsync"):
        monkeypatch.setattr(os, name, refuse)
    tier = DiskTier(tmp_path, 10**6)
    assert tier.get(wanted(1)) is not None and not tier.put(record(2))


def test_a_file_in_place_of_the_directory_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        DiskTier(tmp_path / "file", 10**6)
    assert "file" in str(caught.value) and caught.value.param == "kv_cache_dir"


WRITE_FOREVER = """
import itertools, sys
from pathlib import Path
from tests.shared.tier_items import record
from mini_engine.tiers.disk import DiskTier
tier = DiskTier(Path(sys.argv[1]), 10**12)
print("writing", flush=True)
for number in itertools.count():
    tier.put(record(number, 200_000))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="NOT CHECKED: Windows has no SIGKILL")
def test_a_writer_killed_in_the_middle_leaves_whole_records_only(tmp_path):
    command = [sys.executable, "-c", WRITE_FOREVER, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, cwd=ROOT) as writer:
        writer.stdout.readline()
        while len(list(tmp_path.glob("??/*.kv"))) < 5 and writer.poll() is None:
            time.sleep(0.01)
        writer.send_signal(signal.SIGKILL)
    tier = DiskTier(tmp_path, 10**12)
    assert len(tier) >= 5 and not list(tier.verify()), "a name is given only to a file that is complete"
    assert not list(tmp_path.glob("??/*.tmp")), "what the writer left is removed at the start"


@pytest.mark.reference
def test_what_killed_servers_left_is_swept_and_what_is_being_written_counts(tmp_path):
    DiskTier(tmp_path, 10**6).put(record(1))
    [folder] = tmp_path.glob("??")
    for number, path in enumerate([folder / "a.1-2.tmp", tmp_path / "probe-7.tmp"]):
        path.write_bytes(bytes(50_000 + number))
    tier = DiskTier(tmp_path, 10**6)
    assert not list(tmp_path.rglob("*.tmp")) and tier.num_unfinished == 0 and len(tier) == 1
    with create(folder / "b.1-3.tmp") as file:  # another server, or another thread of this one
        file.write(bytes(60_000))
        file.flush()
        tier.scan()
        assert tier.num_unfinished == 60_000 and list(folder.glob("*.tmp"))
        tier.max_bytes = tier.num_bytes + 60_000 + record(2).num_bytes - 1
        assert tier.put(record(2)) and tier.counts["evicted"] == 1, "its bytes are on the disk, too"
    tier.scan()
    assert tier.num_unfinished == 0 and not list(folder.glob("*.tmp"))


@pytest.mark.reference
def test_where_files_cannot_be_locked_what_is_old_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "is_abandoned", lambda path: False)
    tier = DiskTier(tmp_path, 10**6)
    for name, seconds in (("new.tmp", time.time()), ("old.tmp", time.time() - ABANDONED_SECONDS - 60)):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (seconds, seconds))
    tier.scan()
    assert [path.name for path in tmp_path.glob("*.tmp")] == ["new.tmp"] and tier.num_unfinished == 100


def test_a_full_queue_drops_and_never_waits():
    gate, done = threading.Event(), []

    def slow(item):
        gate.wait()
        done.append(item)

    background = Background("slow", slow, max_items=2)
    taken = [background.offer(number) for number in range(10)]
    assert taken.count(True) <= 3 and background.num_dropped == taken.count(False) >= 7
    gate.set()
    assert background.flush(PATIENCE) and done == [number for number, ok in enumerate(taken) if ok]
    background.close(PATIENCE)
    assert not background.offer(11) and not background.thread.is_alive()


def test_a_full_queue_refuses_without_waiting():
    gate, waits = threading.Event(), []
    background = Background("slow", lambda item: gate.wait(), max_items=1)
    put = background.items.put
    background.items.put = lambda item, block=True, timeout=None: waits.append(block) or put(item, block, timeout)
    while background.offer(1):
        pass
    assert not any(waits), "a step that hands over a block must not wait for the disk"
    background.items.put = put
    gate.set()
    background.close(PATIENCE)


def test_one_item_that_fails_ends_only_itself(caplog):
    done = []

    def work(item):
        if item == 1:
            raise ValueError("broken")
        done.append(item)

    background = Background("fails", work, max_items=8)
    for number in range(3):
        background.offer(number)
    background.close(PATIENCE)
    assert done == [0, 2] and "fails" in caplog.text


def test_what_is_dropped_from_the_host_tier_is_found_on_the_disk(opened, tmp_path):
    tiers = opened(Tiers.of_size(tmp_path, 2 * SIZE, 10**6))
    for number in range(5):
        tiers.put(record(number))
    assert tiers.flush()
    assert all(tiers.get(wanted(number)) for number in range(5))
    assert tiers.num_found["disk"] >= 3


@pytest.fixture
def on_disk(tmp_path, opened):
    """Return a function that opens tiers of which the disk alone has the first `count` records."""

    def make(count, host_bytes, **more):
        first = Tiers.of_size(tmp_path, 0, 10**6)
        for number in range(count):
            first.put(record(number))
        first.close()
        return opened(Tiers.of_size(tmp_path, host_bytes, 10**6, **more))

    return make


def test_prefetch_brings_records_from_the_disk_to_host_memory(on_disk):
    tiers = on_disk(3, 10**6)
    asked = [wanted(number) for number in range(4)]
    assert tiers.prefetch(asked), "three of them are on their way"
    while tiers.prefetch(asked):
        time.sleep(0.001)
    assert [one.key in tiers.host for one in asked] == [True, True, True, False]


def test_what_did_not_fit_into_the_queue_is_read_ahead_later(on_disk):
    tiers = on_disk(9, 10**6, max_waiting=2)
    asked = [wanted(number) for number in range(9)]
    deadline = time.monotonic() + PATIENCE
    while tiers.prefetch(asked) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert all(one.key in tiers.host for one in asked), "a long prefix takes several steps, but all of it arrives"


def test_a_host_tier_that_is_too_small_does_not_make_a_request_wait_forever(on_disk):
    tiers = on_disk(4, 2 * SIZE)
    asked = [wanted(number) for number in range(4)]
    waits = 0
    while tiers.prefetch(asked) and waits < 60_000:
        waits += 1
        time.sleep(0.001)
    assert waits < 60_000, "each record is read ahead once; whatever is gone by then is computed"
    assert tiers.get(wanted(0), read_disk=False) is None


def test_what_was_read_from_the_disk_is_in_host_memory_then_and_may_be_read_ahead_again(on_disk):
    tiers = on_disk(2, 10**6)
    assert tiers.get(wanted(1)) and record(1).key in tiers.host, "the next request finds it in host memory"
    for _ in range(2):
        tiers.host.clear()
        assert tiers.prefetch([wanted(1)]), "it is only on the disk again, and was asked for since it was read ahead"
        tiers.reader.flush(PATIENCE)
        assert tiers.get(wanted(1), read_disk=False), "read ahead"


def test_what_is_on_the_disk_does_not_wait_to_be_written_again(opened, tmp_path):
    tiers = opened(Tiers.of_size(tmp_path, 10**6, 10**6))
    tiers.put(record(1))
    assert tiers.flush()
    offered = []
    tiers.writer.offer = lambda one: offered.append(one.key) or True
    tiers.put(record(1))
    tiers.put(record(2))
    assert offered == [record(2).key], "a place in the writer's queue is for what the disk lacks"
