"""Lesson 6. An answer's end: what was kept back is shown, unless a stop string ended it."""

from types import SimpleNamespace

from mini_engine.engine.answer import AnswerText
from mini_engine.engine.detokenizer import Checked

TOKENIZER = SimpleNamespace(token_bytes=[b"a", b"END"], special_ids=())


class Kept:
    """A detokenizer that has kept `tail` back."""

    def __init__(self, tail):
        self.tail = tail

    def finish(self):
        return self.tail


class Watching(Kept):
    """A stop checker that has kept `tail` back, and that finds `stop` in whatever it is given."""

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


def test_the_end_shows_what_both_have_kept_back():
    checker = Watching("EN")
    answer = ending(Kept("\ufffd"), checker)
    assert answer.finish() == "\ufffdEN", "what the detokenizer kept, and then what the stop checker kept"
    assert checker.given == ["\ufffd"], "the last characters may complete a stop string: let it see them"


def test_after_a_stop_string_nothing_more_is_shown():
    answer = ending(Kept("x"), Watching("y"))
    answer.stop = "END"
    assert answer.finish() == "", "the stop string ended the answer; what came behind it is not shown"


def test_a_stop_string_completed_by_the_last_characters_counts():
    answer = ending(Kept("D"), Watching("never shown", stop="END"))
    assert answer.finish() == "D" and answer.stop == "END"
