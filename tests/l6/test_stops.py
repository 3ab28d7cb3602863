"""Lesson 6. Stop strings: found across pieces of text, never shown in part, earliest completion wins."""

import random
from itertools import pairwise

import pytest

from mini_engine.text.detokenizer import StopChecker


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


@pytest.mark.task(4)
def test_a_possible_beginning_of_a_stop_string_is_held_back():
    checker = StopChecker(["END"])
    assert tuple(checker.push("the EN")) == ("the ", None), "EN may become END: it must not be shown yet"
    assert tuple(checker.push("D")) == ("", "END"), (
        "(text to show, stop string): D completes END, and no part of it is shown"
    )


@pytest.mark.task(4)
def test_text_held_back_is_shown_once_it_cannot_become_a_stop_string():
    checker = StopChecker(["END"])
    assert tuple(checker.push("the EN")) == ("the ", None), "EN may become END"
    assert tuple(checker.push("TRY")) == ("ENTRY", None), "no stop string begins with ENT: show it"


@pytest.mark.task(4)
def test_a_false_start_inside_a_stop_string():
    assert run(["aab"], ["aa", "ab"]) == ("a", "aab"), "in aaab the stop string begins at the second a"


@pytest.mark.task(4)
def test_as_little_as_possible_is_held_back():
    checker = StopChecker(["END", "stop it"])
    assert tuple(checker.push("a long text")) == ("a long text", None), "t begins no stop string: show everything"
    assert tuple(checker.push(" that may s")) == (" that may ", None), "only s may begin a stop string: show the rest"
    assert tuple(checker.push("top i")) == ("", None), "stop i may become stop it"


@pytest.mark.task(4)
def test_the_longest_possible_beginning_is_held_back():
    checker = StopChecker(["aab"])
    assert tuple(checker.push("xaa")) == ("x", None), "both a's may begin aab, so both are held back"
    assert tuple(checker.push("a")) == ("a", None), "in aaa only the last two may begin aab; the first can be shown"


@pytest.mark.task(4)
def test_a_stop_string_may_come_in_its_first_character_and_at_the_very_start():
    assert tuple(StopChecker(["!"]).push("!")) == ("", "!"), "a stop string of one character is complete at once"
    assert tuple(StopChecker(["END"]).push("END")) == ("", "END"), "a stop string at the start of the text ends it"


@pytest.mark.task(4)
def test_nothing_is_held_back_after_a_stop_string():
    checker = StopChecker(["END"])
    checker.push("the E")
    assert tuple(checker.push("ND E")) == ("", "END"), "END is complete"
    assert checker.finish() == "", "the answer has ended: what follows the stop string is dropped, not held back"


@pytest.mark.task(4)
@pytest.mark.parametrize("pieces", [["Hello END there"], ["Hello E", "ND there"], ["Hello ", "E", "N", "D", "!"]])
def test_a_stop_string_split_over_several_pieces_ends_the_answer(pieces):
    assert run(["END"], pieces) == ("Hello ", "END"), "expected the text before the stop string, and no part of it"


def test_text_held_back_is_shown_at_the_end():
    checker = StopChecker(["END"])
    checker.push("the EN")
    assert checker.finish() == "EN", "at the end EN can no longer become END: show it"
    assert checker.finish() == "", "it must be shown only once"


@pytest.mark.task(4)
def test_the_stop_string_completed_first_wins():
    found, why = (
        run(["world", "lo"], ["Hello world"]),
        "expected the text before the stop string that is complete first",
    )
    if found == ("Hello ", "world"):
        why = "lo is completed before world, although world is the first in the list"
    assert found == ("Hel", "lo"), why
    assert run(["lo wor", "o w"], ["Hello world"]) == ("Hell", "o w"), "o w is complete before lo wor"


@pytest.mark.task(4)
def test_of_two_that_end_together_the_longer_wins():
    assert run(["lo", "llo"], ["Hello"]) == ("He", "llo"), "lo and llo end together; the longer one hides more"
    assert run(["llo", "lo"], ["Hello"]) == ("He", "llo"), "in whatever order they are listed"


@pytest.mark.task(4)
def test_of_a_stop_string_that_comes_twice_the_first_counts():
    assert run(["END"], ["one END two END"]) == ("one ", "END"), "the answer ends at the first END, not at the last"


@pytest.mark.task(4)
def test_without_stop_strings_everything_is_shown_at_once():
    assert tuple(StopChecker().push("END")) == ("END", None)
    assert tuple(StopChecker([""]).push("x")) == ("x", None), "an empty stop string must not stop anything"


def cases(count=3000):
    """Yield (text, stop strings, places to cut the text): two letters, so that stop strings come often and overlap."""
    chance = random.Random(0)
    for _ in range(count):
        text = "".join(chance.choices("ab", k=chance.randint(0, 12)))
        stops = ["".join(chance.choices("ab", k=chance.randint(1, 4))) for _ in range(chance.randint(0, 3))]
        yield text, stops, sorted(chance.sample(range(1, len(text)), chance.randint(0, len(text) - 1))) if text else []


@pytest.mark.task(4)
def test_the_result_does_not_depend_on_how_text_is_cut_into_pieces():
    for text, stops, cuts in cases():
        pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
        assert run(stops, pieces) == at_once(stops, text), f"(all text shown, stop string) of {pieces}, stops {stops}"


@pytest.mark.task(4)
def test_no_part_of_the_stop_string_is_ever_shown():
    for text, stops, _ in cases():
        checker, shown, (want, _) = StopChecker(stops), "", at_once(stops, text)
        for character in text:
            piece, stop = checker.push(character)
            shown += piece
            assert want.startswith(shown), f"of {text!r}, stops {stops}, {shown!r} was shown; the answer is {want!r}"
            if stop:
                break
