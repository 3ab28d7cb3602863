"""Lesson 6. An answer in progress in the engine thread, and how long it queued, prefilled and decoded."""

from dataclasses import dataclass, field
from typing import NamedTuple

from mini_engine.engine.answer import AnswerReader
from mini_engine.engine.mailbox import Mailbox
from mini_engine.engine.request import Request


class Times(NamedTuple):
    """Seconds that one answer spent in each phase.

    queued: from submission to the first step that computes something for it, or to its end.
    prefill, decode: from that step to the first token, and from there to the end; 0 if it did not get that far.
    whole: from submission to its end.
    """

    queued: float
    prefill: float
    decode: float
    whole: float


@dataclass(eq=False)
class OpenAnswer:
    """An unfinished answer, owned by the engine thread.

    submitted, started, first: when it was submitted, first computed, and got its first token; None before that.
    latest: when it was submitted or last got a token.
    """

    request: Request
    reader: AnswerReader
    mailbox: Mailbox
    index: int
    submitted: float
    started: float | None = None
    first: float | None = None
    latest: float = field(init=False)

    def __post_init__(self) -> None:
        self.latest = self.submitted

    def note_step(self, began: float) -> None:
        """Record the start of the first step that computes something for this answer. Later steps change nothing."""
        if self.started is None and (self.request.num_computed_tokens or self.request.is_finished):
            self.started = began

    def times(self, now: float) -> Times:
        """Return the times of an answer that ends `now`."""
        started = now if self.started is None else self.started
        first = now if self.first is None else self.first
        return Times(started - self.submitted, first - started, now - first, now - self.submitted)
