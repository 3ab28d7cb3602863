"""Lesson 6. One answer on its way to its reader: turns tokens into text that may be shown."""

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from mini_engine.engine.request import Ending, FinishReason, Request
from mini_engine.engine.sampled import TokenLogprobs
from mini_engine.text.detokenizer import Detokenizer, StopChecker

if TYPE_CHECKING:  # the tokenizer's module imports torch; an answer needs only its bytes
    from mini_engine.text.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """One step's addition to an answer, and all that its reader sees. `text` is "" while no character is complete.

    finish_reason: why the answer ended; None in every delta but the last.
    error: one sentence, with FinishReason.ERROR or GRAMMAR.
    logprobs: one entry for each of `token_ids`; empty unless the parameters ask for them.
    prompt_logprobs: in the first delta, those of the prompt's tokens from the second on, if asked for.
    num_cached_tokens: in the first delta, tokens of the prompt that were found in the prefix cache (lesson 8).
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0


class AnswerText:
    """The detokenizer and the stop strings of one answer.

    Args:
        stops: strings that end the answer. Neither they nor any text after them is shown. A control token, which is
            never shown, ends the answer if its text holds one of them.

    Attributes:
        stop: the stop string that ended the answer, or None.
    """

    def __init__(self, tokenizer: "Tokenizer", stops: Collection[str] = ()) -> None:
        if stops:
            tokenizer.check_stops(stops)
        self.detokenizer = Detokenizer(tokenizer.token_bytes, tokenizer.special_ids)
        self.checker = StopChecker(stops)
        self.marks = stopping_marks(tokenizer, self.checker.stops)
        self.stop: str | None = None

    def push(self, token_id: int) -> str:
        """Return the text that this token allows to be shown. Sets `stop` if a stop string ended the answer."""
        if token_id in self.marks:
            shown = self.finish()
            self.stop = self.stop or self.marks[token_id]
            return shown
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


def stopping_marks(tokenizer: "Tokenizer", stops: Collection[str]) -> dict[int, str]:
    """Return the control tokens whose text holds a stop string, by their ids, with the string."""
    if not stops:
        return {}
    texts = {index: tokenizer.token_bytes[index].decode("utf-8", "replace") for index in tokenizer.special_ids}
    return {index: stop for index, text in texts.items() for stop in stops if stop in text}


class AnswerReader:
    """Turns the tokens that a request gains from step to step into deltas."""

    def __init__(self, request: Request, tokenizer: "Tokenizer") -> None:
        self.request = request
        self.answer = AnswerText(tokenizer, request.params.stop)
        self.num_read = 0

    @property
    def has_news(self) -> bool:
        """True if there are tokens not yet in a delta, or the request has ended."""
        return self.num_read < len(self.request.output_ids) or self.request.is_finished

    @property
    def ends_here(self) -> bool:
        """True if a stop string or the grammar has ended the answer, which the engine cannot know."""
        matcher = self.request.matcher
        return self.answer.stop is not None or matcher.is_over or matcher.error is not None

    def next_delta(self) -> TextDelta:
        """Return everything added since the last call, up to a stop string."""
        request, start, token_ids, shown = self.request, self.num_read, [], ""
        for token_id in request.output_ids[start:]:
            token_ids.append(token_id)
            shown += self.answer.push(token_id)
            if self.answer.stop is not None:
                break
        self.num_read += len(token_ids)
        if self.ends_here or request.is_finished:
            shown += self.answer.finish()
        if self.answer.stop is not None and request.params.include_stop_str_in_output:
            shown += self.answer.stop
        logprobs, ending = tuple(request.logprobs[start : self.num_read]), request.ending(self.answer.stop is not None)
        if start:
            return TextDelta(shown, token_ids, *ending, logprobs)
        of_prompt = tuple(request.prompt_logprobs)
        return TextDelta(shown, token_ids, *ending, logprobs, of_prompt, request.num_cached_tokens)

    def drop_unread(self) -> None:
        """Drop the request's tokens after a stop string. Call this before ending it."""
        if self.answer.stop is not None:
            self.request.keep(self.num_read)


class WholeAnswer:
    """The whole text of an answer: a `Reader` for lesson 5's `generate_all`."""

    def __init__(self, request: Request, tokenizer: "Tokenizer") -> None:
        self.reader = AnswerReader(request, tokenizer)
        self.text = ""

    def read(self) -> Ending:
        """Add the new text. Returns why the answer ends here, if it does."""
        delta = self.reader.next_delta()
        self.text += delta.text
        self.reader.drop_unread()
        return Ending(delta.finish_reason, delta.error)
