"""Lesson 12. A record is returned as it was written, or not at all."""

import dataclasses
import functools
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.tiers.keys import Identity, chain
from mini_engine.tiers.records import CRC, HEADER, MAGIC, VERSION, BadRecord, Kind, Record, Wanted, unpack

ROOT = Path(__file__).resolve().parents[2]
IDENTITY = Identity("weights", "config", "float32", 16)
KEY, PARENT = b"k" * 32, b"p" * 32
RECORD = Record(KEY, PARENT, b"\x01\x00\x00\x00" * 16, bytes(range(200)))
WANTED = Wanted(KEY, PARENT, RECORD.tokens, 200)


@functools.cache
def stored():
    """Return the packed record."""
    return b"".join(bytes(part) for part in RECORD.packed())


def test_what_is_packed_is_parsed_again():
    found = WANTED.parse(stored())
    assert bytes(found.payload) == RECORD.payload, "the payload comes back byte for byte"
    assert (found.key, found.parent, found.tokens, found.kind) == (KEY, PARENT, RECORD.tokens, Kind.KV)
    assert len(stored()) == RECORD.num_bytes, "num_bytes is what a tier has to count for this record"


@given(st.integers(0, RECORD.num_bytes - 1), st.integers(1, 255))
def test_one_flipped_byte_anywhere_makes_it_unusable(position, flip):
    damaged = bytearray(stored())
    damaged[position] ^= flip
    with pytest.raises(BadRecord):
        WANTED.parse(damaged)


@given(st.integers(0, RECORD.num_bytes - 1))
def test_cut_off_anywhere_it_is_unusable(length):
    with pytest.raises(BadRecord) as caught:
        WANTED.parse(stored()[:length])
    assert caught.value.reason == "truncated", "a record that ends too early says so"


def test_bytes_behind_the_end_make_it_unusable():
    with pytest.raises(BadRecord):
        WANTED.parse(stored() + b"\x00")


@pytest.mark.parametrize(
    "change",
    [
        {"key": b"K" * 32},
        {"parent": b"P" * 32},
        {"tokens": b"\x02\x00\x00\x00" * 16},
        {"payload_bytes": 100},
        {"kind": Kind.STATE},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_intact_record_that_is_not_the_wanted_one_is_foreign(change):
    with pytest.raises(BadRecord) as caught:
        dataclasses.replace(WANTED, **change).parse(stored())
    assert caught.value.reason == "foreign", "an intact record of something else must not be an answer"


def intact(version=VERSION, kind=Kind.KV, token_bytes=64, payload_bytes=200):
    """Return a record with any header, and the CRC that belongs to it."""
    header = HEADER.pack(MAGIC, version, kind, token_bytes, payload_bytes, KEY, PARENT)
    content = header + RECORD.tokens + RECORD.payload
    return content + CRC.pack(zlib.crc32(content))


def test_the_bytes_are_those_of_the_format():
    assert stored() == intact(), "another process, or another program, must be able to read them"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": VERSION + 1}, "version"),
        ({"kind": 9}, "damaged"),
        ({"token_bytes": 63}, "truncated"),
        ({"payload_bytes": 2**40}, "truncated"),
    ],
)
def test_a_header_of_another_kind_is_refused_even_with_the_right_crc(change, reason):
    with pytest.raises(BadRecord) as caught:
        unpack(intact(**change))
    assert caught.value.reason == reason, "what cannot be read must be counted as what it is"


def test_unpack_needs_to_know_nothing_about_the_record():
    assert unpack(stored()).key == KEY


@pytest.mark.parametrize("field", ["weights", "config", "kv_dtype", "block_size", "layout"])
def test_a_key_depends_on_everything_that_decides_the_bytes(field):
    other = dataclasses.replace(IDENTITY, **{field: 8 if field in ("block_size", "layout") else "another"})
    assert IDENTITY.root() != other.root(), f"two models that differ in {field} must not share KV"


def test_namespaces_of_different_types_and_texts_are_apart():
    roots = [IDENTITY.root(namespace) for namespace in (None, "", "1", 1, "null")]
    assert len(set(roots)) == len(roots), "a tenant's KV must not be another tenant's"


def test_a_namespace_without_bytes_is_refused():
    with pytest.raises(TypeError):
        IDENTITY.root(("a", object()))


def test_a_root_is_the_same_in_another_process():
    command = [sys.executable, "-c", "import tests.l12.test_records as t; print(t.IDENTITY.root('a').hex())"]
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, encoding="utf-8")
    here = IDENTITY.root("a").hex()
    assert done.stdout.strip() == here, f"the next server must find what this one kept {done.stderr[-300:]}"


def test_a_key_depends_on_its_root():
    roots = [IDENTITY.root(namespace) for namespace in ("a", "b")]
    first, second = ([*chain(root, b"t" * 64, 16)] for root in roots)
    assert not set(first) & set(second), "every key of a text must depend on model and namespace"


def test_no_part_of_the_chain_is_a_block_s_own():
    keys = list(chain(b"r" * 32, b"t" * 64, 16))
    assert len(set(keys)) == 4 and all(len(key) == 32 for key in keys), "equal blocks at different places differ"
    assert keys == list(chain(b"r" * 32, memoryview(b"t" * 64), 16)), "tokens may be bytes or a view of them"
    assert keys[2:] == list(chain(keys[1], b"t" * 32, 16)), "a chain can go on from any of its keys"


# Few different blocks, so that two texts often have the same one at the same place behind different beginnings.
TEXTS = st.builds(
    lambda blocks, rest: b"".join(blocks) + rest,
    st.lists(st.sampled_from([b"a" * 16, b"b" * 16]), min_size=1, max_size=6),
    st.binary(max_size=15),
)


@given(TEXTS, TEXTS)
def test_keys_are_equal_exactly_as_far_as_the_tokens_are(first, second):
    ours, theirs = list(chain(b"", first, 16)), list(chain(b"", second, 16))
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        end = (index + 1) * 16
        assert (one == other) == (first[:end] == second[:end]), "a key stands for its block and every token before it"
    assert len(ours) == len(first) // 16, "only whole blocks have keys"
