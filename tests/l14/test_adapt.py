"""Lesson 14. How many tokens to guess: more after success, fewer after failure, none where rows are not free."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.errors import UserError
from mini_engine.speculation.adapt import MAX_PAUSE, Adaptive, share_of_rows
from mini_engine.speculation.config import Speculation

OUTCOMES = st.lists(st.tuples(st.integers(0, 16), st.floats(0, 1)), max_size=40)


def test_guesses_that_come_true_are_doubled_up_to_the_most():
    adaptive, seen = Adaptive(8), []
    for _ in range(4):
        seen.append(adaptive.next())
        adaptive.record(seen[-1], seen[-1])
    assert seen == [4, 8, 8, 8], "all came true: twice as many next time, max_drafts at most"


def test_a_step_without_guesses_teaches_nothing():
    adaptive = Adaptive(8)
    for _ in range(10):
        adaptive.record(0, 0)
    assert adaptive.next() == 4, "no earlier text fitted, or no row was free: that says nothing about guesses"


def test_guesses_that_fail_become_fewer_and_then_rare():
    adaptive, steps = Adaptive(8), []
    for _ in range(60):
        steps.append(adaptive.next())
        adaptive.record(steps[-1], 0)
    assert steps[:2] == [4, 2], "half as many after a miss"
    assert set(steps[2:]) == {0, 1}, "k never adapts: text that repeats nothing is guessed at every step"
    assert sum(map(bool, steps)) <= 8, "from the second miss in a row on, the pauses double"


def test_guesses_that_partly_come_true_are_one_more_than_that():
    adaptive = Adaptive(16)
    adaptive.record(8, 6)
    assert adaptive.next() == 7
    adaptive.record(7, 1)
    assert adaptive.next() == 3, "not less than half: one early mistake does not undo what was learned"


def test_one_success_ends_the_pauses():
    adaptive = Adaptive(8)
    for _ in range(4):
        adaptive.record(1, 0)
    while adaptive.next() == 0:
        pass
    adaptive.record(1, 1)
    assert [adaptive.next(), adaptive.next()] == [2, 2], "the miss before does not count any more: no pause"


@given(st.integers(1, 64), OUTCOMES)
def test_the_number_stays_within_its_limits(most, outcomes):
    adaptive = Adaptive(most)
    for drafted, share in outcomes:
        adaptive.record(drafted, int(drafted * share))
        assert 1 <= adaptive.k <= most and 0 <= adaptive.pause <= MAX_PAUSE


@pytest.mark.parametrize(("decoding", "share"), [(0, 0), (1, 15), (4, 3), (8, 1), (9, 0), (16, 0), (64, 0)])
def test_requests_share_the_rows_that_are_free(decoding, share):
    assert share_of_rows(16, decoding) == share, "of a request's share of 16 rows, one row is its own token's"


@given(st.integers(1, 100), st.integers(0, 200))
def test_no_step_has_more_rows_because_of_guesses(max_rows, decoding):
    share = share_of_rows(max_rows, decoding)
    assert share >= 0 and (share == 0 or decoding * (1 + share) <= max_rows)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(max_drafts=0),
        dict(max_drafts=65),
        dict(max_drafts=2.0),
        dict(max_drafts=True),
        dict(max_drafts="8"),
        dict(min_ngram=0),
        dict(min_ngram=5),
        dict(max_ngram=1),
        dict(max_rows=0),
        dict(use_tree=1),
    ],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(UserError) as error:
        Speculation(**wrong)
    assert error.value.param == "speculate"


def test_a_number_is_the_most_tokens_to_guess():
    assert Speculation.of(3) == Speculation(max_drafts=3)
    assert Speculation.of(settings := Speculation(use_tree=True)) is settings
