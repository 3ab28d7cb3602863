"""Lesson 14. The number of guesses: more after success, fewer after failure, none where rows are not free."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.base.errors import UserError
from mini_engine.speculation.adapt import MAX_PAUSE, Adaptive, share_of_rows
from mini_engine.speculation.options import Speculation

# What became of some steps: which share of the wanted guesses there was room for, and which share of those came true.
STEPS = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=40)


def pause_of(adaptive):
    """Let steps pass up to the next guess; return how many had none."""
    return next((steps for steps in range(100) if adaptive.next()), 100)


def after_misses(count):
    """Return an Adaptive of 32 guesses at most, after so many misses in a row: k is 16, 8, 4, …"""
    adaptive = Adaptive(32)
    for _ in range(count):
        pause_of(adaptive)
        adaptive.record(1, 0)
    return adaptive


@pytest.mark.task(6)
def test_guesses_that_come_true_are_doubled_up_to_the_most():
    adaptive, seen = Adaptive(8), []
    for _ in range(4):
        seen.append(adaptive.next())
        adaptive.record(seen[-1], seen[-1])
    assert seen == [4, 8, 8, 8], "all came true: twice as many next time, max_drafts at most"


@pytest.mark.task(6)
def test_all_of_a_few_guesses_double_the_number_too():
    adaptive = Adaptive(32)
    adaptive.record(3, 3)
    assert adaptive.next() == 32, "there was room for 3 of k = 16 guesses, and all of them came true: k doubles"


@pytest.mark.task(6)
def test_a_step_without_guesses_teaches_nothing():
    adaptive = Adaptive(8)
    for _ in range(10):
        adaptive.record(0, 0)
    assert adaptive.next() == 4, "no earlier text fitted, or no row was free: that says nothing about guesses"


def test_the_first_guess_has_half_the_most_tokens_and_at_least_one():
    assert [Adaptive(most).next() for most in (1, 2, 3, 8, 64)] == [1, 1, 1, 4, 32], "half of max_drafts to begin with"


@pytest.mark.task(6)
def test_guesses_that_fail_become_fewer_and_then_rare():
    adaptive, steps = Adaptive(8), []
    for _ in range(60):
        steps.append(adaptive.next())
        adaptive.record(steps[-1], 0)
    assert steps[:2] == [4, 2], "half as many after a miss"
    assert set(steps[2:]) == {0, 1}, "k never adapts: text that repeats nothing is guessed at every step"
    assert sum(map(bool, steps)) <= 8, "from the second miss in a row on, pauses grow: in 60 steps 8 guesses at most"


@pytest.mark.task(6)
def test_guesses_that_partly_come_true_are_one_more_than_that():
    adaptive = Adaptive(16)
    adaptive.record(8, 6)
    assert adaptive.next() == 7, "6 of 8 came true: next time one more than that"
    adaptive.record(7, 1)
    assert adaptive.next() == 3, "not less than half: one early mistake does not undo what was learned"


@pytest.mark.task(6)
def test_a_few_guesses_that_fail_halve_the_number():
    adaptive = Adaptive(32)
    adaptive.record(4, 1)
    assert adaptive.next() == 8, "1 of 4 guesses came true: half of k = 16, however many of them there was room for"


@pytest.mark.task(6)
def test_pauses_are_1_3_7_steps_and_16_at_most():
    assert pause_of(after_misses(1)) == 0, "one miss: no pause yet"
    assert pause_of(after_misses(2)) == 1, "the second miss in a row: one step passes without a guess"
    found = [pause_of(after_misses(count)) for count in range(1, 8)]
    assert found == [0, 1, 3, 7, 15, 16, 16], "after 1 to 7 misses in a row: 1, 3, 7, … steps, and 16 at most"


@pytest.mark.task(6)
def test_one_success_ends_the_pauses():
    adaptive = after_misses(4)
    pause_of(adaptive)
    adaptive.record(1, 1)
    assert [adaptive.next(), adaptive.next()] == [2, 2], "the miss before does not count any more: no pause"


@pytest.mark.task(6)
@pytest.mark.parametrize(("drafted", "accepted"), [(1, 1), (4, 1)], ids=["all came true", "one of four"])
def test_misses_on_both_sides_of_a_success_are_not_in_a_row(drafted, accepted):
    adaptive = after_misses(2)
    pause_of(adaptive)
    adaptive.record(drafted, accepted)
    adaptive.record(2, 0)
    assert pause_of(adaptive) == 0, f"{accepted} of {drafted} came true: the next miss starts a new run"
    adaptive.record(2, 0)
    assert pause_of(adaptive) == 1, "and the one after that is the second"


@pytest.mark.task(6)
@given(st.integers(1, 64), STEPS)
def test_the_number_stays_within_its_limits(most, steps):
    adaptive = Adaptive(most)
    for room, share in steps:
        drafted = math.ceil(room * adaptive.next())
        accepted = int(share * drafted)
        if drafted:
            adaptive.record(drafted, accepted)
        what = f"after {accepted} of {drafted} guesses came true"
        assert 1 <= adaptive.k <= most, f"{what}, k is {adaptive.k}: it must be from 1 to max_drafts, {most}"
        assert 0 <= adaptive.pause <= MAX_PAUSE, f"{what}, the pause is {adaptive.pause} steps of {MAX_PAUSE} at most"


@pytest.mark.task(6)
@pytest.mark.parametrize(("decoding", "share"), [(1, 15), (4, 3), (8, 1), (9, 0), (16, 0), (64, 0), (0, 0)])
def test_requests_share_the_rows_that_are_free(decoding, share):
    why = (
        "of a request's share of 16 rows, one row is its own token's" if decoding else "no request decodes: no guesses"
    )
    assert share_of_rows(16, decoding) == share, why


@pytest.mark.task(6)
@given(st.integers(1, 100), st.integers(0, 200))
def test_no_step_has_more_rows_because_of_guesses(max_rows, decoding):
    share = share_of_rows(max_rows, decoding)
    assert share >= 0, "a number of guesses is not negative"
    assert share == 0 or decoding * (1 + share) <= max_rows, (
        f"{decoding} requests with 1 + {share} rows each have more than {max_rows} rows"
    )
    assert not decoding or decoding * (2 + share) > max_rows, (
        f"{decoding} requests with 1 + {share} rows each leave room for one more guess each in {max_rows} rows"
    )


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
