"""Lesson 12. A record is returned as it was written, or not at all."""

import dataclasses
import functools
import inspect
import itertools
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.tiers.keys import KEY_BYTES, Identity, chain, config_digest
from mini_engine.tiers.records import CRC, HEADER, MAGIC, VERSION, BadRecord, Kind, Record, Wanted, unpack
from tests.support import OneOf, must_raise

ROOT = Path(__file__).resolve().parents[2]
IDENTITY = Identity("weights", "config", "float32", 16)
KEY, PARENT = b"k" * 32, b"p" * 32
RECORD = Record(KEY, PARENT, b"\x01\x00\x00\x00" * 16, bytes(range(200)))
WANTED = Wanted(KEY, PARENT, RECORD.tokens, 200)


@functools.cache
def stored():
    """Return the packed record."""
    return b"".join(bytes(part) for part in RECORD.packed())


def intact(magic=MAGIC, version=VERSION, kind=Kind.KV, token_bytes=64, payload_bytes=200):
    """Return a record with any header, and the CRC that belongs to it."""
    header = HEADER.pack(magic, version, kind, token_bytes, payload_bytes, KEY, PARENT)
    content = header + RECORD.tokens + RECORD.payload
    return content + CRC.pack(zlib.crc32(content))


@pytest.mark.task(1)
def test_the_bytes_are_those_of_the_format():
    fields = HEADER.unpack(stored()[: HEADER.size])
    assert fields == (MAGIC, VERSION, int(Kind.KV), 64, 200, KEY, PARENT), (
        "the header: magic, version, kind, bytes of tokens, bytes of payload, key, parent"
    )
    assert stored()[HEADER.size : -CRC.size] == RECORD.tokens + RECORD.payload, "after the header: tokens, payload"
    assert stored()[-CRC.size :] == intact()[-CRC.size :], (
        "the CRC-32 covers header, tokens and payload: another process must be able to read them"
    )


@pytest.mark.task(1)
def test_what_is_packed_is_parsed_again():
    found = WANTED.parse(stored())
    assert bytes(found.payload) == RECORD.payload, "the payload comes back byte for byte"
    assert (found.key, found.parent, found.tokens, found.kind) == (KEY, PARENT, RECORD.tokens, Kind.KV)
    assert len(stored()) == RECORD.num_bytes, "num_bytes is what a tier has to count for this record"


@pytest.mark.task(1)
def test_payloads_are_not_copied():
    """A payload is megabytes, and a step waits while one is packed or parsed."""
    assert any(part is RECORD.payload for part in RECORD.packed()), "`packed` must return the payload itself, uncopied"
    source = bytearray(intact())
    payload = WANTED.parse(source).payload
    source[-CRC.size - 1] ^= 1
    assert payload[-1] == source[-CRC.size - 1], "a parsed payload is a view of the stored bytes, not a copy of them"


@pytest.mark.task(1)
@given(st.integers(0, RECORD.num_bytes - 1), st.integers(1, 255))
def test_one_flipped_byte_anywhere_makes_it_unusable(position, flip):
    damaged = bytearray(stored())
    damaged[position] ^= flip
    with must_raise(BadRecord, f"byte {position} of {len(damaged)} is not as it was written: raise BadRecord"):
        WANTED.parse(damaged)


@pytest.mark.task(1)
@given(st.integers(0, RECORD.num_bytes - 1))
def test_cut_off_anywhere_it_is_unusable(length):
    with must_raise(BadRecord, f"only {length} of {RECORD.num_bytes} bytes are there: raise BadRecord") as caught:
        WANTED.parse(stored()[:length])
    assert caught.value.reason == "truncated", "a record that ends too early says so"


@pytest.mark.task(1)
def test_bytes_behind_the_end_make_it_unusable():
    with must_raise(BadRecord, "a byte follows the record's end: raise BadRecord"):
        WANTED.parse(stored() + b"\x00")


@pytest.mark.task(1)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"magic": b"KVRECORE"}, "version damaged"),
        ({"version": VERSION + 1}, "version"),
        ({"kind": 9}, "damaged"),
        ({"token_bytes": 63}, "truncated"),
        ({"payload_bytes": 2**40}, "truncated"),
    ],
)
def test_a_header_of_another_kind_is_refused_even_with_the_right_crc(change, reason):
    ((field, value),) = change.items()
    with must_raise(BadRecord, f"the header says {field} = {value!r}, and the CRC is right: raise BadRecord") as caught:
        unpack(intact(**change))
    assert caught.value.reason == OneOf(*reason.split()), "count what cannot be read under its reason"


@pytest.mark.task(1)
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
    (field,) = change
    why = f"the record is intact, but not the wanted one (other {field}): raise BadRecord"
    with must_raise(BadRecord, why) as caught:
        dataclasses.replace(WANTED, **change).parse(stored())
    assert caught.value.reason == "foreign", "an intact record of something else must not be an answer"


@pytest.mark.task(1)
def test_unpack_needs_to_know_nothing_about_the_record():
    assert unpack(stored()).key == KEY


@pytest.mark.task(2)
@pytest.mark.parametrize("field", ["weights", "config", "kv_dtype", "block_size", "layout"])
def test_a_key_depends_on_everything_that_decides_the_bytes(field):
    other = dataclasses.replace(IDENTITY, **{field: 8 if field in ("block_size", "layout") else "another"})
    assert IDENTITY.root() != other.root(), f"two models that differ in {field} must not share KV"


@pytest.mark.reference
def test_what_a_model_is_called_does_not_depend_on_how_it_is_sampled():
    plain = Qwen3Config(8, 8, 8, 1, 1, 1)
    sampled = dataclasses.replace(plain, sampling={"temperature": 0.6})
    deeper = dataclasses.replace(plain, num_hidden_layers=2)
    assert config_digest(sampled) == config_digest(plain) != config_digest(deeper)


@pytest.mark.task(2)
def test_a_root_knows_where_a_field_ends():
    one, other = Identity("ab", "c", "float32", 1, 16), Identity("a", "bc", "float32", 11, 6)
    assert one.root() != dataclasses.replace(one, block_size=11, layout=6).root(), (
        "block_size=1, layout=16 and block_size=11, layout=6 must have different roots: separate the fields"
    )
    assert one.root() != dataclasses.replace(other, block_size=1, layout=16).root(), (
        'weights="ab", config="c" and weights="a", config="bc" must have different roots: separate the fields'
    )


@pytest.mark.task(2)
def test_a_root_is_as_long_as_a_key():
    assert (type(IDENTITY.root()), len(IDENTITY.root())) == (bytes, KEY_BYTES), "a digest, as the keys behind it"


@pytest.mark.task(2)
def test_namespaces_of_different_types_and_texts_are_apart():
    for one, other in itertools.combinations([None, "", "1", 1, "null", "None", "'1'"], 2):
        assert IDENTITY.root(one) != IDENTITY.root(other), (
            f"namespaces {one!r} and {other!r} have the same root: one tenant would read another tenant's KV"
        )


@pytest.mark.task(2)
def test_a_namespace_without_bytes_is_refused():
    for namespace in (("a", object()), ("a", "b"), 1.5, b"a"):
        with must_raise(TypeError, f"{namespace!r} is neither None nor a string or an integer: raise TypeError"):
            IDENTITY.root(namespace)


def some_keys():
    """Return a root and two keys behind it, in hex."""
    root = IDENTITY.root("a")
    return [key.hex() for key in (root, *chain(root, b"t" * 32, 16))]


@pytest.mark.task(2)
@pytest.mark.skipif(sys.platform == "emscripten", reason="a page has no second process; check it in a terminal")
def test_a_root_is_the_same_in_another_process():
    imports = "from mini_engine.tiers.keys import Identity, chain"  # no more: torch takes seconds
    code = f"{imports}\nIDENTITY = {IDENTITY!r}\n{inspect.getsource(some_keys)}\nprint(*some_keys())"
    command = [sys.executable, "-c", code]
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, encoding="utf-8")
    there, here = done.stdout.split(), some_keys()
    assert there[:1] == here[:1], f"the root: the next server must find what this one kept {done.stderr[-300:]}"
    assert there == here, "the keys of a chain: the next server must find what this one kept"


# Few different blocks, so that two texts often have the same one at the same place behind different beginnings.
BLOCKS = st.text("ab", min_size=1, max_size=6)


@pytest.mark.task(2)
@given(BLOCKS, BLOCKS, st.integers(0, 15))
def test_keys_are_equal_exactly_as_far_as_the_tokens_are(first, second, rest):
    """A letter stands for a block of 16 bytes; `rest` bytes behind them do not fill another."""
    texts = ["".join(letter * 16 for letter in text).encode() + bytes(rest) for text in (first, second)]
    ours, theirs = (list(chain(b"", text, 16)) for text in texts)
    assert len(ours) == len(first), "only whole blocks have keys"
    for end, (one, other) in enumerate(zip(ours, theirs, strict=False), 1):
        assert (one == other) == (first[:end] == second[:end]), "a key stands for its block and every token before it"


@pytest.mark.task(2)
def test_a_key_depends_on_its_root():
    roots = [IDENTITY.root(namespace) for namespace in ("a", "b")]
    for one, other in zip(*([*chain(root, b"t" * 64, 16)] for root in roots), strict=True):
        assert one != other, "every key of a text must depend on model and namespace"


@pytest.mark.task(2)
def test_no_part_of_the_chain_is_a_block_s_own():
    keys = list(chain(b"r" * 32, b"t" * 64, 16))
    assert [len(key) for key in keys] == [KEY_BYTES] * 4, "64 bytes of tokens are four blocks of 16, with a digest each"
    assert len(set(keys)) == 4, "equal blocks at different places have different keys"
    assert keys == list(chain(b"r" * 32, memoryview(b"t" * 64), 16)), "tokens may be bytes or a view of them"
    assert keys[2:] == list(chain(keys[1], b"t" * 32, 16)), "a chain can go on from any of its keys"
