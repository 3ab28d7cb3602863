"""Lesson 6. The end of an answer: text held back is shown, unless a stop string ended the answer."""

from types import SimpleNamespace

import pytest

from mini_engine.engine.answer import AnswerText
from mini_engine.text.detokenizer import Checked

pytestmark = pytest.mark.task(5)

TOKENIZER = SimpleNamespace(token_bytes=[b"a", b"END"], special_ids=())


class Holding:
    """A detokenizer that holds back `tail`."""

    def __init__(self, tail):
        self.tail = tail

    def finish(self):
        return self.tail


class Watching(Holding):
    """A stop checker that holds back `tail` and finds `stop` in any text it is given."""

    def __init__(self, tail, stop=None):
        super().__init__(tail)
        self.stop, self.given = stop, []

    def push(self, text):
        self.given.append(text)
        return Checked(text, self.stop)


def ending(detokenizer, checker):
    answer = AnswerText(TOKENIZER)
    answer.detokenizer, answer.checker = detokenizer, checker
    return answer


def test_the_end_shows_what_both_hold_back():
    checker = Watching("EN")
    answer = ending(Holding("\ufffd"), checker)
    shown, why = answer.finish(), "expected what the detokenizer held, then what the stop checker held"
    if shown == "\ufffd":
        why = "what the stop checker held is lost: at the end it can no longer become a stop string, so show it"
    assert shown == "\ufffdEN", why
    assert checker.given == ["\ufffd"], "the last characters may complete a stop string: pass them through the checker"


def test_after_a_stop_string_nothing_more_is_shown():
    answer = ending(Holding("x"), Watching("y"))
    answer.stop = "END"
    assert answer.finish() == "", "the stop string ended the answer; text after it must not be shown"


def test_a_stop_string_completed_by_the_last_characters_counts():
    answer = ending(Holding("D"), Watching("never shown", stop="END"))
    shown = answer.finish()
    assert answer.stop == "END", "the last characters completed a stop string: set `stop`"
    assert shown == "D", (
        "show what the checker lets through, and not what it held back: that is part of the stop string"
    )


def test_an_answer_without_a_stop_string_has_none_at_the_end():
    answer = ending(Holding(""), Watching(""))
    assert answer.finish() == "", "nothing was held back"
    assert answer.stop is None, "no stop string ended the answer"
