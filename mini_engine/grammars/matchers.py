"""Lesson 7. The engine's grammars and matchers over llguidance's, which never raise but keep their first error."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from llguidance import LLMatcher

T = TypeVar("T")
SHOWN = 300  # characters of llguidance's reasons
REASONS = {  # llguidance's errors for limits that schemas exceed, and their meaning for a client
    "NoExtensionBias": "nothing fits it; does a $ref lead back to itself?",
    "Too many items": "too much can come next; does a $ref lead back to itself without an end?",
    "items; max is": "too many properties can come next; make more of them required, or use fewer",
    "too many expressions": "a pattern, or a number of repetitions, is too large",
    "fuel": "a pattern, or a number of repetitions, is too large",
}


class CompiledGrammar:
    """An engine's Grammar. Every matcher is a copy of the compiled one."""

    def __init__(self, compiled: "LLMatcher") -> None:
        self.compiled = compiled

    def matcher(self) -> "GuidedMatcher":
        """Return a matcher at the beginning of an answer."""
        return GuidedMatcher(self.compiled)


class GuidedMatcher:
    """An engine's Matcher over a copy of llguidance's, which never raises but keeps its first error."""

    def __init__(self, compiled: "LLMatcher") -> None:
        self.compiled, self.inner = compiled, compiled.deep_copy()
        self.taken: list[int] = []
        self.is_over = False
        self.error: str | None = None

    @property
    def may_end(self) -> bool:
        """True if the answer is complete as it is."""
        return self.inner.is_accepting()

    def mask(self) -> bytes:
        """Return a bit for each token id."""
        return self.inner.compute_bitmask()

    def push(self, token_id: int) -> None:
        """Take the token that was chosen."""
        self.taken.append(token_id)
        self.inner.consume_token(token_id)
        self.is_over = self.inner.is_stopped()
        if self.inner.is_error():
            self.error = f"the answer cannot continue in the requested output format: {reason_of(self.inner)}"

    def num_valid(self, drafts: Sequence[int]) -> int:
        """Return how many of `drafts` may come next, one after the other, without ending the answer."""
        count = self.inner.validate_tokens(list(drafts))
        return count - self.look_ahead(drafts[:count], lambda inner: inner.is_stopped()) if count else 0

    def mask_after(self, drafts: Sequence[int]) -> bytes:
        """Return a bit for each token id: 1 if it may follow `drafts`."""
        return self.look_ahead(drafts, lambda inner: inner.compute_bitmask())

    def look_ahead(self, drafts: Sequence[int], look: "Callable[[LLMatcher], T]") -> T:
        """Return the result of `look` after `drafts`, and roll back.

        A limit may be exceeded there that this answer itself never reaches, and llguidance's errors are permanent: in
        that case, a new matcher replays the answer's tokens.
        """
        self.inner.consume_tokens(list(drafts))
        found = look(self.inner)
        if not self.inner.rollback(len(drafts)):
            self.inner = self.compiled.deep_copy()
            self.inner.consume_tokens(self.taken)
        return found


def reason_of(matcher: "LLMatcher") -> str:
    """Return why a matcher has failed: a sentence from REASONS, or the first line of its own error."""
    message = matcher.get_error().strip().split("\n", 1)[0][:SHOWN]
    return next((reason for sign, reason in REASONS.items() if sign in message), message)
