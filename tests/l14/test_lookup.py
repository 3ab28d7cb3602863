"""Lesson 14. Prompt lookup: the longest n-gram, its latest place, and what followed it there."""

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.engine.sampled import Sampled
from mini_engine.speculation.config import Speculation
from mini_engine.speculation.lookup import LookupDrafter, Text, copy_from, find_continuation
from tests.l14.toys import request_of

FEW = st.lists(st.integers(0, 3), max_size=40)  # few tokens, so that texts repeat themselves
TRICKY = st.lists(st.sampled_from([0, 1, 256, 65_536, 16_777_216, 257]), max_size=40)  # bytes that match across tokens


def text_of(token_ids):
    text = Text()
    text.follow(token_ids)
    return text


def naive(token_ids, num_tokens):
    """Compare token by token, from the end."""
    for end in range(len(token_ids) - 1, num_tokens - 1, -1):
        if token_ids[end - num_tokens : end] == token_ids[-num_tokens:]:
            return end
    return None


@given(FEW | TRICKY, st.integers(1, 5))
def test_a_lookup_finds_what_a_naive_search_finds(token_ids, num_tokens):
    assert text_of(token_ids).find_last(num_tokens) == naive(token_ids, num_tokens)


@given(FEW | TRICKY, st.integers(1, 3), st.integers(0, 3))
def test_the_longest_n_gram_decides(token_ids, least, more):
    found = [naive(token_ids, size) for size in range(least + more, least - 1, -1)]
    want = next((position for position in found if position is not None), None)
    assert find_continuation(text_of(token_ids), least + more, least) == want


@given(st.lists(FEW, max_size=5))
def test_a_text_that_grows_is_the_text_packed_at_once(parts):
    grown, token_ids = Text(), []
    for part in parts:
        token_ids = token_ids + part
        grown.follow(token_ids)
    assert grown.packed == text_of(token_ids).packed and len(grown) == len(token_ids)


def test_the_latest_occurrence_wins():
    position = find_continuation(text_of([1, 2, 7, 1, 2, 8, 1, 2]), 2, 2)
    assert position == 5, "1 2 occurred twice before; what followed it last is the better guess"


def test_a_longer_match_wins_over_a_later_one():
    token_ids = [5, 1, 2, 7, 9, 1, 2, 8, 5, 1, 2]
    assert token_ids[find_continuation(text_of(token_ids), 3, 2)] == 7


def test_the_tail_does_not_find_itself():
    assert text_of([1, 2, 3]).find_last(2) is None
    assert text_of([1, 2, 1]).find_last(1) == 1


@pytest.mark.parametrize("token_ids", [[], [1], [1, 2]])
def test_a_short_text_has_no_guess(token_ids):
    assert find_continuation(text_of(token_ids), 4, 1) is None


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(0, 11), st.integers(0, 20))
def test_copying_goes_on_into_what_was_copied(token_ids, position, count):
    position = min(position, len(token_ids) - 1)
    want = list(token_ids)
    for i in range(count):
        want.append(want[position + i])
    assert copy_from(token_ids, position, count) == want[len(token_ids) :]


def test_the_answer_is_part_of_the_text():
    drafter, request = LookupDrafter(Speculation()), request_of([1, 2, 3], [4, 5, 6])
    assert drafter.propose(request, 3) == []
    for token in (4, 5):
        request.append(Sampled(token, None))
    assert drafter.propose(request, 3) == [6, 4, 5], "4 5 was followed by 6 before, and then by 4 5 again"


def test_no_more_tokens_than_asked_for():
    drafter, request = LookupDrafter(Speculation()), request_of([1, 2, 3, 4, 5, 6, 1, 2])
    assert [len(drafter.propose(request, count)) for count in (1, 2, 5)] == [1, 2, 5]


def test_a_request_that_is_gone_leaves_nothing_behind():
    drafter, request = LookupDrafter(Speculation()), request_of([1, 2, 1, 2])
    drafter.propose(request, 1)
    del request
    gc.collect()
    assert not drafter.texts
