"""Lesson 6. Turns tokens into text as they arrive: never half a character, never part of a stop string.

A token is a sequence of bytes. Its last bytes may begin a character that a later token completes, so they are held back
until then. The cost of a token depends only on its own bytes, however long the answer is.
"""

import codecs
from collections.abc import Collection, Sequence
from typing import NamedTuple

from mini_engine.base.errors import UserError


class Detokenizer:
    """Decodes the tokens of one answer, one at a time. The concatenated deltas equal decoding all tokens at once.

    Args:
        token_bytes: the bytes of each token id (`Tokenizer.token_bytes`).
        hidden_ids: tokens that are not shown, such as end marks.
    """

    def __init__(self, token_bytes: Sequence[bytes], hidden_ids: Collection[int] = ()) -> None:
        self.token_bytes, self.hidden_ids = token_bytes, hidden_ids
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that this token completes: "" if a character is still unfinished or the token is hidden.

        Bytes that cannot become a character give U+FFFD, as many as decoding all at once gives. A hidden token changes
        nothing: bytes held back before it are still held back.
        """
        if token_id in self.hidden_ids:
            return ""
        return self.decoder.decode(self.token_bytes[token_id])

    def finish(self) -> str:
        """End the answer. Return U+FFFD if bytes are left that never became a character, otherwise ""; then always "".

        One unfinished character is one U+FFFD, however many bytes of it there are.
        """
        return self.decoder.decode(b"", final=True)


class Checked(NamedTuple):
    """Text that may be shown, and the stop string that was just completed, if any."""

    text: str
    stop: str | None


class StopChecker:
    """Ends an answer at the first stop string to be completed, without showing any part of it.

    Text that may be the beginning of a stop string is held back until that is decided. If one piece of text completes
    several stop strings, the one that ends first wins; if two end at the same position, the longer one.
    """

    def __init__(self, stops: Collection[str] = ()) -> None:
        if isinstance(stops, str) or not isinstance(stops, Collection) or not all(isinstance(s, str) for s in stops):
            raise UserError(f"stops is {stops!r}; give a list of strings")
        self.stops = [stop for stop in stops if stop]
        self.longest = max(map(len, self.stops), default=0)
        self.held = ""

    def push(self, text: str) -> Checked:
        """Take the next piece of text; return the text to show now, and the stop string that was completed or None.

        As much as possible is shown: only the longest suffix that is the beginning of a stop string is held back. With
        a stop string, the text is what comes before it; the rest of the piece is dropped, and `held` is "" again.
        """
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
        """End the text. Return the text held back: it has not become a stop string."""
        held, self.held = self.held, ""
        return held

    def _unclear(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is the beginning of a stop string, but not all of it.

        A helper for `push`, which need not use it.
        """
        for size in range(min(len(text), self.longest - 1), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self.stops):
                return size
        return 0
