"""Lesson 6. Stop strings: found across pieces of text, never shown in part, earliest completion wins."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.engine.detokenizer import StopChecker


def run(stops, pieces):
    """Feed the pieces. Returns (all text shown, the stop string or None)."""
    checker, shown = StopChecker(stops), ""
    for piece in pieces:
        text, stop = checker.push(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + checker.finish(), None


def at_once(stops, text):
    """The specification: find the first completion by trying every end."""
    for end in range(len(text) + 1):
        done = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("pieces", [["Hello END there"], ["Hello E", "ND there"], ["Hello ", "E", "N", "D", "!"]])
def test_a_stop_string_split_over_several_pieces_ends_the_answer(pieces):
    assert run(["END"], pieces) == ("Hello ", "END"), "expected the text before the stop string, and no part of it"


def test_a_possible_beginning_of_a_stop_string_is_held_back():
    checker = StopChecker(["END"])
    assert checker.push("the EN") == ("the ", None), "EN may become END: it must not be shown yet"
    assert checker.push("D") == ("", "END")


def test_text_held_back_is_shown_once_it_cannot_become_a_stop_string():
    checker = StopChecker(["END"])
    assert checker.push("the EN") == ("the ", None)
    assert checker.push("TRY") == ("ENTRY", None), "no stop string begins with ENT: show it"


def test_text_held_back_is_shown_at_the_end():
    checker = StopChecker(["END"])
    checker.push("the EN")
    assert checker.finish() == "EN"
    assert checker.finish() == "", "it must be shown only once"


def test_text_that_became_a_stop_string_is_not_shown_at_the_end():
    checker = StopChecker(["END"])
    checker.push("the EN")
    checker.push("D")
    assert checker.finish() == ""


def test_the_stop_string_completed_first_wins():
    assert run(["world", "lo"], ["Hello world"]) == ("Hel", "lo")
    assert run(["lo wor", "o w"], ["Hello world"]) == ("Hell", "o w"), "it is completed first, although it begins later"


def test_of_two_that_end_together_the_longer_wins():
    assert run(["lo", "llo"], ["Hello"]) == ("He", "llo")


def test_a_false_start_inside_a_stop_string():
    assert run(["aab"], ["aa", "ab"]) == ("a", "aab"), "in aaab the stop string begins at the second a"


def test_without_stop_strings_everything_is_shown_at_once():
    assert StopChecker().push("END") == ("END", None)
    assert StopChecker([""]).push("x") == ("x", None), "an empty stop string must not stop anything"


@given(
    text=st.text("ab ", max_size=30),
    stops=st.lists(st.text("ab ", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_the_result_does_not_depend_on_how_text_is_cut_into_pieces(text, stops, cuts):
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
