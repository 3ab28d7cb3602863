"""Lesson 6. Stop strings: over tokens and chunks, never shown in part, the earliest completion wins."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.engine.detokenizer import StopChecker


def run(stops, pieces):
    """(all that was shown, the stop string or None), piece by piece."""
    checker, shown = StopChecker(stops), ""
    for piece in pieces:
        text, stop = checker.push(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + checker.finish(), None


def at_once(stops, text):
    """The specification: where is the first completion, found by trying every end."""
    for end in range(len(text) + 1):
        done = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("pieces", [["Hello END there"], ["Hello E", "ND there"], ["Hello ", "E", "N", "D", "!"]])
def test_a_stop_string_over_several_pieces_ends_the_answer(pieces):
    assert run(["END"], pieces) == ("Hello ", "END"), "the text before the stop string, and nothing of it"


def test_a_part_of_a_stop_string_is_held_back_until_it_is_clear():
    checker = StopChecker(["END"])
    assert checker.push("the EN") == ("the ", None), "EN may become END: it must not be shown yet"
    assert checker.push("D") == ("", "END")


def test_what_was_held_back_is_shown_when_it_turns_out_harmless():
    checker = StopChecker(["END"])
    assert checker.push("the EN") == ("the ", None)
    assert checker.push("TRY") == ("ENTRY", None), "ENT begins no stop string: show it"


def test_what_was_held_back_is_shown_at_the_end():
    checker = StopChecker(["END"])
    checker.push("the EN")
    assert checker.finish() == "EN"
    assert checker.finish() == "", "and once"


def test_what_was_held_back_and_became_a_stop_string_is_not_shown_at_the_end():
    checker = StopChecker(["END"])
    checker.push("the EN")
    checker.push("D")
    assert checker.finish() == ""


def test_the_stop_string_completed_first_wins():
    assert run(["world", "lo"], ["Hello world"]) == ("Hel", "lo")
    assert run(["lo wor", "o w"], ["Hello world"]) == ("Hell", "o w"), "it is completed first, though it begins later"


def test_of_two_that_end_together_the_longer_wins():
    assert run(["lo", "llo"], ["Hello"]) == ("He", "llo")


def test_a_false_start_inside_a_stop_string():
    assert run(["aab"], ["aa", "ab"]) == ("a", "aab"), "aaab: the stop string begins at the second a"


def test_without_stop_strings_everything_is_shown_at_once():
    assert StopChecker().push("END") == ("END", None)
    assert StopChecker([""]).push("x") == ("x", None), "an empty stop string stops nothing"


@given(
    text=st.text("ab ", max_size=30),
    stops=st.lists(st.text("ab ", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_pieces_make_no_difference(text, stops, cuts):
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert run(stops, pieces) == at_once(stops, text)


@given(text=st.text("ab", max_size=20), stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_no_part_of_the_stop_string_is_ever_shown(text, stops):
    checker, shown = StopChecker(stops), ""
    for character in text:
        piece, stop = checker.push(character)
        shown += piece
        want, _ = at_once(stops, text)
        assert want.startswith(shown), f"{shown!r} was shown, but the answer is {want!r}"
        if stop:
            return
