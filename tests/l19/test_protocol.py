"""Lesson 19. The handshake: two ends that differ in what decides a buffer's bytes exchange none."""

from dataclasses import fields, replace

import pytest

from mini_engine.handover.protocol import Layout

OURS = Layout("1" * 64, "c" * 64, "float32", 16, 4096, 0)
OTHER = {
    "weights": "2" * 64,
    "config": "d" * 64,
    "kv_dtype": "int8",
    "block_size": 32,
    "block_bytes": 2048,
    "num_extra_bytes": 96,
    "version": 99,
}


def words(sentence):
    return sentence.replace("_", " ")


@pytest.mark.task(2)
def test_two_ends_that_are_alike_may_exchange_bytes():
    assert OURS.differs(replace(OURS)) == "", "the same in every field: nothing to say"


@pytest.mark.task(2)
@pytest.mark.parametrize("name", OTHER)
def test_each_field_that_differs_is_named(name):
    said = words(OURS.differs(replace(OURS, **{name: OTHER[name]})))
    assert words(name) in said, f"the bytes of a buffer depend on {words(name)}, so it must be compared and named"
    others = [words(other) for other in OTHER if other != name and words(other) not in words(name)]
    assert [other for other in others if other in said] == [], "fields that are the same are not worth a word"


@pytest.mark.task(2)
def test_both_values_are_said():
    said = OURS.differs(replace(OURS, kv_dtype="int8"))
    assert "int8" in said, "say what the other process has"
    assert "float32" in said, "say what this process has"
    if "instead of" in said:
        assert "int8" in said.partition("instead of")[0], "the other process has int8 instead of this one's float32"


@pytest.mark.task(2)
def test_all_differences_are_said_at_once():
    said = words(OURS.differs(replace(OURS, block_size=32, block_bytes=8192)))
    for part in ("block size", "32", "16", "block bytes", "8192", "4096"):
        assert part in said, "a user who mends one difference should not meet the next one afterwards"


@pytest.mark.task(2)
def test_digests_are_shortened():
    said = OURS.differs(replace(OURS, weights="2" * 64))
    assert "2" * 12 in said, "the beginning of a digest tells two models apart"
    assert len(said) < 100, "64 digits of each digest hide the sentence: `short` shows the beginning"


@pytest.mark.task(2)
def test_the_sentence_is_about_the_other_process():
    theirs = replace(OURS, block_size=32)
    assert OURS.differs(theirs) != theirs.differs(OURS), "each end says how the other one differs from itself"


def test_the_test_knows_every_field():
    assert set(OTHER) == {field.name for field in fields(Layout)}
