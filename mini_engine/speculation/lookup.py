"""Lesson 14. Prompt lookup: the tokens that followed an earlier occurrence of the last few are likely to follow again.

An answer that edits a text, quotes a document or counts repeats parts of its prompt or of itself. No second model is
needed: the request's own tokens are the draft model (Saxena, Prompt Lookup Decoding, 2023).

Tokens are packed as 4 bytes each, as in lesson 8, so a lookup is a search for a few bytes from the end: about 10 µs in
8,192 tokens, and no index to keep up to date.
"""

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from mini_engine.engine.request import Request
from mini_engine.kv.radix_node import TOKEN_BYTES, key_of
from mini_engine.speculation.options import Speculation


class Drafter(Protocol):
    """Guesses the next tokens of requests."""

    def propose(self, request: Request, count: int) -> list[int]:
        """Return up to `count` tokens that may follow the request's own; none if there is no good guess."""
        ...


class Text:
    """A request's tokens as bytes. Tokens are only ever appended, so `follow` packs each one once."""

    def __init__(self) -> None:
        self.packed = bytearray()

    def __len__(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    def follow(self, token_ids: Sequence[int]) -> None:
        """Append the tokens of `token_ids` that are not packed yet."""
        if len(self) < len(token_ids):
            self.packed += key_of(token_ids[len(self) :])

    def find_last(self, num_tokens: int) -> int | None:
        """Return the position after the latest earlier occurrence of the last `num_tokens` tokens; None without one.

        The occurrence may overlap those tokens themselves, and at least one token follows it.
        """
        if len(self) <= num_tokens:
            return None
        size = num_tokens * TOKEN_BYTES
        tail, end = self.packed[-size:], len(self.packed) - TOKEN_BYTES
        while (at := self.packed.rfind(tail, 0, end)) % TOKEN_BYTES:  # across token boundaries: look further left
            if at < 0:
                return None
            end = at + size - 1
        return at // TOKEN_BYTES + num_tokens


def find_continuation(text: Text, max_ngram: int, min_ngram: int) -> int | None:
    """Return the position to copy from: after the latest earlier occurrence of the longest n-gram that has one.

    Longer matches are better evidence, so longer n-grams are tried first.
    """
    for num_tokens in range(max_ngram, min_ngram - 1, -1):
        if (position := text.find_last(num_tokens)) is not None:
            return position
    return None


def copy_from(token_ids: Sequence[int], position: int, count: int) -> list[int]:
    """Return `count` tokens from `position` on, as if each were appended before the next is read.

    So a text that has begun to repeat itself, "a b a b", keeps repeating, however short its period.
    """
    period = token_ids[position:]
    return [period[i % len(period)] for i in range(count)]


class LookupDrafter:
    """Guesses by prompt lookup. A request's packed text is dropped together with the request."""

    def __init__(self, speculation: Speculation) -> None:
        self.speculation = speculation
        self.texts: WeakKeyDictionary[Request, Text] = WeakKeyDictionary()

    def propose(self, request: Request, count: int) -> list[int]:
        """Return `count` tokens from the latest place where the request's last tokens occurred, or none."""
        text = self.texts.setdefault(request, Text())
        text.follow(request.token_ids)
        position = find_continuation(text, self.speculation.max_ngram, self.speculation.min_ngram)
        return [] if position is None else copy_from(request.token_ids, position, count)
