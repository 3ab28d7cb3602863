"""Lesson 6. One answer on its way to its reader: takes tokens, gives text that may be shown."""

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from mini_engine.engine.detokenizer import Detokenizer, StopChecker
from mini_engine.engine.request import FinishReason, Request

if TYPE_CHECKING:  # loading the tokenizer's module takes torch; an answer needs only its bytes
    from mini_engine.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """What a step added to an answer. `text` may be "": a token need not complete a character.

    finish_reason: why the answer ended; None in every delta but the last.
    error: one sentence, with FinishReason.ERROR.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    error: str | None = None


class AnswerText:
    """The detokenizer and the stop strings of one answer.

    Args:
        stops: strings that end the answer. Neither they nor any text after them is shown.

    Attributes:
        stop: the stop string that ended the answer, or None.
    """

    def __init__(self, tokenizer: "Tokenizer", stops: Collection[str] = ()) -> None:
        self.detokenizer = Detokenizer(tokenizer.token_bytes, tokenizer.special_ids)
        self.checker = StopChecker(stops)
        self.stop: str | None = None

    def push(self, token_id: int) -> str:
        """Return the text that this token allows to be shown. Sets `stop` if a stop string ended the answer."""
        shown, self.stop = self.checker.push(self.detokenizer.push(token_id))
        return shown

    def finish(self) -> str:
        """End the tokens. Returns the text still held back, or "" if a stop string has ended the answer already.

        What the detokenizer held back passes through the checker like any text: it may complete a stop string, which
        sets `stop`, and then only the text before that is returned.
        """
        if self.stop is not None:
            return ""
        shown, self.stop = self.checker.push(self.detokenizer.finish())
        return shown if self.stop is not None else shown + self.checker.finish()


class AnswerReader:
    """Turns the tokens that a request gains from step to step into deltas."""

    def __init__(self, request: Request, tokenizer: "Tokenizer") -> None:
        self.request = request
        self.answer = AnswerText(tokenizer, request.params.stop)
        self.num_read = 0

    @property
    def has_news(self) -> bool:
        """Whether there are tokens not yet in a delta, or the request has ended."""
        return self.num_read < len(self.request.output_ids) or self.request.is_finished

    @property
    def ends_here(self) -> bool:
        """Whether a stop string or the grammar's end has ended the answer, which the engine does not know."""
        return self.answer.stop is not None or self.request.matcher.is_over

    def next_delta(self) -> TextDelta:
        """Return what the request has gained since the last call, up to a stop string."""
        token_ids, shown = [], ""
        for token_id in self.request.output_ids[self.num_read :]:
            token_ids.append(token_id)
            shown += self.answer.push(token_id)
            if self.answer.stop is not None:
                break
        self.num_read += len(token_ids)
        if self.ends_here or self.request.is_finished:
            shown += self.answer.finish()
        matcher = self.request.matcher
        if matcher.error is not None:
            return TextDelta(shown, token_ids, FinishReason.ERROR, matcher.error)
        reason = FinishReason.STOP if self.ends_here else self.request.finish_reason
        return TextDelta(shown, token_ids, reason, self.request.error)

    def drop_unread(self) -> None:
        """Drop the tokens that the request has gained behind a stop string. Call this before ending it."""
        if self.answer.stop is not None:
            self.request.keep(self.num_read)


class WholeAnswer:
    """The whole text of an answer: a `Reader` for lesson 5's `generate_all`."""

    def __init__(self, request: Request, tokenizer: "Tokenizer") -> None:
        self.reader = AnswerReader(request, tokenizer)
        self.text = ""

    def read(self) -> bool:
        """Add the new text. Returns True if a stop string or the grammar ends the answer here."""
        self.text += self.reader.next_delta().text
        self.reader.drop_unread()
        return self.reader.ends_here
