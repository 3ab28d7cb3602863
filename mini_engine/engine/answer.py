"""Lesson 6. One answer on its way to the reader: tokens in, text that may be shown out."""

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from mini_engine.engine.detokenizer import Detokenizer, StopChecker
from mini_engine.engine.request import FinishReason

if TYPE_CHECKING:  # loading the tokenizer's module takes torch; an answer needs only its bytes
    from mini_engine.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """What a step added to an answer. `text` may be "": a token need not complete a character.

    finish_reason: why the answer ended, in its last delta; None before.
    error: in one sentence, with FinishReason.ERROR.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    error: str | None = None


class AnswerText:
    """Detokenizer and stop strings of one answer.

    Args:
        stops: strings that end the answer. They are not shown, and neither is what comes behind them.

    Attributes:
        stop: the stop string that ended the answer, or None.
    """

    def __init__(self, tokenizer: "Tokenizer", stops: Collection[str] = ()) -> None:
        self.detokenizer = Detokenizer(tokenizer.token_bytes, tokenizer.special_ids)
        self.checker = StopChecker(stops)
        self.stop: str | None = None

    def push(self, token_id: int) -> str:
        """The text that this token lets us show. If `stop` is set afterwards, the answer has ended with it."""
        shown, self.stop = self.checker.push(self.detokenizer.push(token_id))
        return shown

    def finish(self) -> str:
        """The tokens have ended: show what was kept back, unless a stop string ended the answer."""
        if self.stop is not None:
            return ""
        shown, self.stop = self.checker.push(self.detokenizer.finish())
        return shown if self.stop is not None else shown + self.checker.finish()
