"""Lesson 6. From tokens to text as they come: never half a character, never a part of a stop string.

A token is bytes. Its last bytes may be the first of a character that the next token completes, so they are kept back
until then. The cost of a token is the cost of its own bytes, however long the answer is.
"""

import codecs
from collections.abc import Collection, Sequence
from typing import NamedTuple

from mini_engine.errors import UserError


class Detokenizer:
    """One answer's tokens, turned into text one by one. All deltas together are what decoding at once would give.

    Args:
        token_bytes: for each token id, its bytes (`Tokenizer.token_bytes`).
        hidden_ids: tokens that are not shown, such as end marks.
    """

    def __init__(self, token_bytes: Sequence[bytes], hidden_ids: Collection[int] = ()) -> None:
        self.token_bytes, self.hidden_ids = token_bytes, hidden_ids
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is unfinished or the token is hidden."""
        if token_id in self.hidden_ids:
            return ""
        return self.decoder.decode(self.token_bytes[token_id])

    def finish(self) -> str:
        """The answer has ended: bytes that never became a character, as U+FFFD, or ""."""
        return self.decoder.decode(b"", final=True)


class Checked(NamedTuple):
    """Text that may be shown, and the stop string that has just been completed, if one has."""

    text: str
    stop: str | None


class StopChecker:
    """Ends an answer at the first stop string that is completed, and never shows a part of it.

    Text that might be the beginning of a stop string is held back until it is clear. Where several stop strings are
    completed in one piece of text, the one that ends first wins; of two that end together, the longer.
    """

    def __init__(self, stops: Collection[str] = ()) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) for stop in stops):
            raise UserError(f"stops is {stops!r}; give a list of texts")
        self.stops = [stop for stop in stops if stop]
        self.longest = max(map(len, self.stops), default=0)
        self.held = ""

    def push(self, text: str) -> Checked:
        """Take the next piece of text; show what can be shown."""
        text = self.held + text
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self.stops if stop in text]
        if ends:
            end, _, stop = min(ends)
            self.held = ""
            return Checked(text[: end - len(stop)], stop)
        keep = self._unclear(text)
        self.held = text[len(text) - keep :]
        return Checked(text[: len(text) - keep], None)

    def finish(self) -> str:
        """No more text comes: what was held back is no stop string after all."""
        held, self.held = self.held, ""
        return held

    def _unclear(self, text: str) -> int:
        """The length of the longest end of `text` that begins a stop string."""
        for size in range(min(len(text), self.longest - 1), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self.stops):
                return size
        return 0
