"""Lesson 4. Grammars decide which tokens may come next; the sampler masks all others.

A grammar belongs to the parameters and does not change; a matcher is its state in one answer and belongs to the
request, so it survives a preemption. Lesson 7 makes grammars of JSON schemas.
"""

from collections.abc import Sequence
from typing import Protocol


class TokenMask(Protocol):
    """The tokens that may come next, as a bit mask."""

    def mask(self) -> bytes:
        """Return a bit for each token id, the lowest bit of a byte first: 1 if the token may come next."""
        ...


class Matcher(TokenMask, Protocol):
    """The state of one answer in its grammar.

    is_over: the answer is complete, and no token may follow.
    may_end: the answer is complete, and more tokens may follow.
    error: why the grammar cannot go on, in one sentence; the request then ends with it.
    """

    @property
    def is_over(self) -> bool: ...
    @property
    def may_end(self) -> bool: ...
    @property
    def error(self) -> str | None: ...

    def push(self, token_id: int) -> None:
        """Take the token that was chosen."""
        ...

    def num_valid(self, drafts: Sequence[int]) -> int:
        """Return how many of `drafts` may come next, one after the other, without ending the answer."""
        ...

    def mask_after(self, drafts: Sequence[int]) -> bytes:
        """Return the mask after `drafts`, all of them valid. The matcher stays where it is."""
        ...


class Grammar(Protocol):
    """A format that answers must follow."""

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of an answer."""
        ...


class Anything:
    """The grammar of a request that asks for none, and also its matcher: it masks no token and has no state."""

    is_over, may_end = False, True
    error: str | None = None

    def matcher(self) -> "Anything":
        """Return this object: there is no state."""
        return self

    def mask(self) -> bytes:
        """Never called: the sampler masks only rows with a grammar."""
        return b""

    def push(self, token_id: int) -> None:
        """Do nothing."""

    def num_valid(self, drafts: Sequence[int]) -> int:
        """Return the number of drafts: all are allowed."""
        return len(drafts)

    def mask_after(self, drafts: Sequence[int]) -> bytes:
        """Never called, like `mask`."""
        return b""

    def __reduce__(self) -> str:
        """Pickle by name: in another process it is that process's ANYTHING."""
        return "ANYTHING"


ANYTHING = Anything()


class Broken(Anything):
    """A matcher that has failed: its answer ends with `error`."""

    def __init__(self, error: str) -> None:
        self.error = error

    def __reduce__(self) -> tuple:
        """Pickle by value, unlike `Anything`."""
        return Broken, (self.error,)
