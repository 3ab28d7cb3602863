"""Lesson 14. Prompt lookup: the longest n-gram, its latest place, and what followed it there."""

import gc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mini_engine.engine.sampled import Sampled
from mini_engine.speculation.lookup import LookupDrafter, Text, copy_from, find_continuation
from mini_engine.speculation.options import Speculation
from tests.l14.toys import request_of

FEW = st.lists(st.integers(0, 3), max_size=40)  # few tokens, so that texts repeat themselves
TRICKY = st.lists(st.sampled_from([0, 1, 256, 65_536, 16_777_216, 257]), max_size=40)  # bytes that match across tokens


def text_of(token_ids):
    text = Text()
    text.follow(token_ids)
    return text


def positions(token_ids, *sizes):
    """Return the position that `find_last` gives for each number of last tokens."""
    return [text_of(token_ids).find_last(size) for size in sizes]


def naive(token_ids, num_tokens):
    """Compare token by token, from the end."""
    for end in range(len(token_ids) - 1, num_tokens - 1, -1):
        if token_ids[end - num_tokens : end] == token_ids[-num_tokens:]:
            return end
    return None


@given(st.lists(FEW, max_size=5))
def test_a_text_that_grows_is_the_text_packed_at_once(parts):
    grown, token_ids = Text(), []
    for part in parts:
        token_ids = token_ids + part
        grown.follow(token_ids)
    assert grown.packed == text_of(token_ids).packed, "the same bytes, however the text came"
    assert len(grown) == len(token_ids), "the number of tokens, not of bytes"


@pytest.mark.task(1)
def test_the_tail_does_not_find_itself():
    assert positions([1, 2, 3], 2) == [None], "2 3 occurred only here, and nothing follows them yet"
    assert positions([1, 2, 1], 1) == [1], "the position after the earlier 1, where 2 is"
    assert positions([5, 1, 2, 8, 1, 2], 2) == [3], "the position after the earlier 1 2, where 8 is"


@pytest.mark.task(1)
def test_the_shortest_n_gram_is_tried_too():
    assert find_continuation(text_of([1, 2, 7, 3, 1, 2]), 4, 2) == 2, (
        "only the last 2 tokens occurred before, and min_ngram is 2: they are tried too"
    )
    assert find_continuation(text_of([1, 2, 7, 3, 1, 2]), 4, 3) is None, "the last 3 tokens did not, and 2 are too few"


@pytest.mark.task(1)
def test_the_latest_occurrence_wins():
    position = find_continuation(text_of([1, 2, 7, 1, 2, 8, 1, 2]), 2, 2)
    assert position == 5, "1 2 occurred twice before; what followed it last is the better guess"


@pytest.mark.task(1)
def test_an_occurrence_may_overlap_the_last_tokens():
    assert positions([7, 7, 7], 2) == [2], (
        "7 7 stood one token earlier, and was followed by 7: it may overlap the last tokens"
    )


@pytest.mark.task(1)
def test_bytes_of_two_tokens_are_no_occurrence():
    token_ids = [9, 1 << 16, 2 << 16, 5, 1]  # the bytes of token 1 also lie across the second and the third token
    assert positions(token_ids, 1) == [None], "what was found is half of one token and half of the next"


@pytest.mark.task(1)
def test_left_of_bytes_of_two_tokens_the_search_goes_on():
    token_ids = [1, 9, 1 << 16, 2 << 16, 5, 1]  # as above, and behind a true 1
    assert positions(token_ids, 1) == [1], "the bytes across two tokens are none, but 1 was the first token: search on"
    assert positions([0, 256, 0], 1) == [1], (
        "the hit across two tokens overlaps the first 0: the next search ends one byte earlier, not where that begins"
    )


@pytest.mark.task(1)
def test_more_tokens_than_there_are_occurred_nowhere():
    assert positions([7, 7], 2, 3, 9) == [None, None, None], "the whole text, or more than it, has no earlier place"


@pytest.mark.task(1)
def test_a_longer_match_wins_over_a_later_one():
    token_ids = [5, 1, 2, 7, 9, 1, 2, 8, 5, 1, 2]
    position = find_continuation(text_of(token_ids), 3, 2)
    assert position == 3, (
        "5 1 2 was followed by 7; that 1 2 was later followed by 8 counts less: the longer match is better evidence"
    )


@pytest.mark.task(1)
@pytest.mark.parametrize("token_ids", [[], [1], [1, 2]])
def test_a_short_text_has_no_guess(token_ids):
    assert find_continuation(text_of(token_ids), 4, 1) is None, "no token occurred before"


@pytest.mark.task(1)
@given(FEW | TRICKY, st.integers(1, 5))
@example([0, 256, 0], 1)
def test_a_lookup_finds_what_a_naive_search_finds(token_ids, num_tokens):
    assert positions(token_ids, num_tokens) == [naive(token_ids, num_tokens)], (
        f"where the last {num_tokens} of {token_ids} occurred last before, compared token by token"
    )


@pytest.mark.task(1)
@given(FEW | TRICKY, st.integers(1, 3), st.integers(0, 3))
def test_the_longest_n_gram_decides(token_ids, least, more):
    sizes = range(least + more, least - 1, -1)
    want = next((position for size in sizes if (position := naive(token_ids, size)) is not None), None)
    assert find_continuation(text_of(token_ids), least + more, least) == want, (
        f"of {token_ids}, the longest n-gram of {least} to {least + more} tokens that occurred before"
    )


@pytest.mark.task(2)
def test_a_copy_begins_at_the_position():
    assert copy_from([5, 6, 7, 8], 1, 2) == [6, 7], "2 tokens from position 1 on"
    assert copy_from([5, 6, 7, 8], 3, 0) == [], "no token was asked for"


@pytest.mark.task(2)
def test_a_text_that_repeats_itself_goes_on_doing_so():
    assert copy_from([9, 4, 5, 4, 5], 3, 5) == [4, 5, 4, 5, 4], "past the text's end the copy itself is read"


@pytest.mark.task(2)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(0, 11), st.integers(0, 20))
def test_copying_goes_on_into_what_was_copied(token_ids, position, count):
    position = min(position, len(token_ids) - 1)
    want = list(token_ids)
    for i in range(count):
        want.append(want[position + i])
    assert copy_from(token_ids, position, count) == want[len(token_ids) :], (
        f"{count} tokens from position {position} on, each appended to the text before the next one is read"
    )


def test_the_answer_is_part_of_the_text():
    drafter, request = LookupDrafter(Speculation()), request_of([1, 2, 3], [4, 5, 6])
    assert drafter.propose(request, 3) == [], "no token occurred twice"
    for token in (4, 5):
        request.append(Sampled(token, None))
    assert drafter.propose(request, 3) == [6, 4, 5], "4 5 was followed by 6 before, and then by 4 5 again"


def test_no_more_tokens_than_asked_for():
    drafter, request = LookupDrafter(Speculation()), request_of([1, 2, 3, 4, 5, 6, 1, 2])
    assert [len(drafter.propose(request, count)) for count in (1, 2, 5)] == [1, 2, 5], "as many as asked for"


def test_a_request_that_is_gone_leaves_nothing_behind():
    drafter, request = LookupDrafter(Speculation()), request_of([1, 2, 1, 2])
    drafter.propose(request, 1)
    del request
    gc.collect()
    assert not drafter.texts, "the packed text of a request that is gone"
