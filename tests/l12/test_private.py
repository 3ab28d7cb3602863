"""Lesson 12. Records on the disk are private, and are believed only if they can be."""

import os
import stat
import sys
import zlib
from types import SimpleNamespace

import pytest

from mini_engine.__main__ import main
from mini_engine.base.errors import UserError
from mini_engine.tiers import files
from mini_engine.tiers.disk import DiskTier
from mini_engine.tiers.records import CRC, BadRecord
from mini_engine.tiers.seal import TAG_BYTES, KeyedSeal, seal_of
from tests.shared.tier_items import SIZE, record, wanted
from tests.support import OneOf, refused, store_of

posix = pytest.mark.skipif(sys.platform == "win32", reason="NOT CHECKED: Windows has no modes, owners or device files")
SECRET = bytes(range(32))


def forge(path, tag_bytes=0):
    """Turn a record's numbers around and put its CRC right, as any program can that may write the file."""
    content = bytearray(path.read_bytes())
    end = len(content) - tag_bytes - CRC.size
    content[end - 100 : end] = bytes(255 - byte for byte in content[end - 100 : end])
    content[end : end + CRC.size] = CRC.pack(zlib.crc32(content[:end]))
    path.write_bytes(content)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@posix
def test_other_users_cannot_read_what_is_stored(tmp_path):
    before = os.umask(0)  # the least careful one
    try:
        tier = DiskTier(tmp_path / "cache", 10**6)
        tier.put(record(1))
    finally:
        os.umask(before)
    path = tier.path(record(1).key)
    found = {place.name: f"{mode(place):o}" for place in (tier.directory, path.parent, path)}
    assert list(found.values()) == ["700", "700", "600"], f"a record has the prompt's tokens in clear: {found}"


@posix
def test_a_directory_that_others_may_use_is_refused_in_one_sentence(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(UserError, match="chmod go=") as caught:
        DiskTier(tmp_path, 10**6)
    assert caught.value.param == "kv_cache_dir" and str(tmp_path) in str(caught.value)


@posix
def test_a_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    """Its owner could replace any record, and may have put it there to be written to."""
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(UserError):
        DiskTier(tmp_path, 10**6)


@posix
@pytest.mark.parametrize("kind", ["link to a device", "link to a record", "pipe", "directory"])
def test_what_is_no_regular_file_is_never_opened(tier, tmp_path, monkeypatch, kind):
    """/dev/zero has no end: a server that reads a record from it runs out of memory; a pipe would make it wait."""
    path = tier.path(record(1).key)
    if kind == "link to a record":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.unlink()
        make = {"link to a device": lambda: path.symlink_to("/dev/zero"), "pipe": lambda: os.mkfifo(path)}
        make.get(kind, path.mkdir)()

    def opened(*given, **options):
        raise AssertionError("look at what a name stands for before opening it")

    monkeypatch.setattr(files, "open", opened, raising=False)
    assert tier.get(wanted(1)) is None and tier.counts["irregular"] == 1
    assert [reason for _, reason in DiskTier(tmp_path, 10**6).verify()] == OneOf([], ["irregular"]), (
        "and `verify` says so"
    )


@posix
def test_what_is_replaced_after_the_look_is_not_read_either(tier, monkeypatch):
    path = tier.path(record(1).key)
    as_it_was = path.lstat()
    path.unlink()
    os.mkfifo(path)
    monkeypatch.setattr(type(path), "lstat", lambda self: as_it_was)
    with pytest.raises(BadRecord) as caught:
        files.read_regular(path, as_it_was.st_size)
    assert caught.value.reason == "irregular", "the file that was opened decides, not the one that was looked at"


@pytest.mark.parametrize("num_bytes", [0, SIZE - 1, SIZE + 1, 2**40])
def test_a_file_of_another_size_is_not_read(tier, num_bytes):
    with tier.path(record(1).key).open("r+b") as file:
        file.truncate(num_bytes)  # 2**40 bytes take no room on a disk, and all of a machine's memory
    assert tier.get(wanted(1)) is None and tier.counts["truncated"] == 1


def test_a_crc_does_not_say_who_wrote_a_record(tier):
    """The page says so; if this ever fails, the page may promise more."""
    forge(tier.path(record(1).key))
    assert bytes(tier.get(wanted(1)).payload) != record(1).payload


def test_with_a_key_a_forged_record_is_a_counted_miss(tmp_path):
    tier = DiskTier(tmp_path, 10**6, KeyedSeal(SECRET))
    assert tier.put(record(1)) and bytes(tier.get(wanted(1)).payload) == record(1).payload
    path = tier.path(record(1).key)
    assert path.stat().st_size == SIZE + TAG_BYTES == tier.num_bytes, "the tag counts against the tier's size"
    forge(path, TAG_BYTES)
    assert tier.get(wanted(1)) is None and tier.counts["forged"] == 1, "a CRC that fits is not enough"
    assert not path.exists(), "and what was forged is not asked for again"


@pytest.mark.parametrize("position", [0, 100, SIZE - 1, SIZE, SIZE + TAG_BYTES - 1])
def test_no_byte_of_a_sealed_record_can_be_changed(position):
    seal = KeyedSeal(SECRET)
    parts = record(1).packed()
    stored = bytearray(b"".join([*parts, seal.tag(parts)]))
    assert bytes(seal.opened(stored)) == b"".join(parts)
    stored[position] ^= 1
    with pytest.raises(BadRecord, match="forged"):
        seal.opened(stored)


def test_a_record_sealed_with_another_key_or_none_is_not_believed(tmp_path):
    DiskTier(tmp_path, 10**6, KeyedSeal(b"another" * 8)).put(record(1))
    DiskTier(tmp_path, 10**6).put(record(2))
    tier = DiskTier(tmp_path, 10**6, KeyedSeal(SECRET))
    assert tier.get(wanted(1)) is None and tier.get(wanted(2)) is None
    assert (tier.counts["forged"], tier.counts["truncated"]) == (1, 1)


def key_file(folder, content=SECRET, mode=0o600):
    path = folder / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("content", "mode", "values"),
    [(b"short", 0o600, "5"), (bytes(2**17), 0o600, ""), (SECRET, 0o644, "")],
)
def test_a_key_file_that_keeps_no_secret_is_refused(tmp_path, content, mode, values):
    if mode == 0o644 and sys.platform == "win32":
        pytest.skip("NOT CHECKED: Windows has no modes")
    with refused(UserError, values) as caught:
        seal_of(key_file(tmp_path, content, mode))
    assert caught.value.param == "kv_cache_key_file"


def test_a_key_file_that_is_not_there_is_one_sentence(tmp_path):
    with refused(UserError, "none"):
        seal_of(tmp_path / "none")


@pytest.mark.reference  # no task is about this
def test_the_option_reaches_the_disk(engine_of, tmp_path):
    key = key_file(tmp_path)
    engine = engine_of(kv_always=True, kv_cache_dir=tmp_path / "cache", kv_cache_key_file=key)
    disk = store_of(engine).tiers.disk
    disk.put(record(1))
    with pytest.raises(BadRecord):
        KeyedSeal(b"guessed").opened(disk.path(record(1).key).read_bytes())
    with pytest.raises(UserError, match="kv_cache_dir"):
        engine_of(kv_cache_key_file=key)


@pytest.mark.reference
def test_the_commands_know_the_key(tmp_path, capsys):
    from mini_engine.cli.arguments import load_llm
    from mini_engine.cli.parser import OneLineParser
    from mini_engine.cli.serve import add_arguments

    cache, secret = tmp_path / "cache", key_file(tmp_path)
    DiskTier(cache, 10**6, seal_of(secret)).put(record(1))
    assert main(["cache", "verify", str(cache), "--kv-cache-key-file", str(secret)]) == 0
    forge(next(cache.glob("??/*.kv")), TAG_BYTES)
    assert main(["cache", "verify", str(cache), "--kv-cache-key-file", str(secret)]) == 1
    assert "forged" in capsys.readouterr().out
    parser = OneLineParser(prog="serve")
    add_arguments(parser)
    given = parser.parse_args(["--kv-cache-dir", str(cache), "--kv-cache-key-file", str(tmp_path / "none")])
    with refused(UserError, "none"):
        load_llm(SimpleNamespace(**vars(given)))
