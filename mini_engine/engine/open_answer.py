"""Lesson 6. An answer that the engine's thread is making, and what it has spent its time on."""

from dataclasses import dataclass, field
from typing import NamedTuple

from mini_engine.engine.answer import AnswerReader
from mini_engine.engine.mailbox import Mailbox
from mini_engine.engine.request import Request


class Times(NamedTuple):
    """The seconds of one answer.

    queued: from its submission to the first step that computes something for it, or to its end.
    prefill, decode: from there to its first token, and from that to its end; 0 if it did not come so far.
    whole: from its submission to its end.
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
        """Note a step that began then, which may be the first that computed something for this answer."""
        if self.started is None and (self.request.num_computed_tokens or self.request.is_finished):
            self.started = began

    def times(self, now: float) -> Times:
        """Return what the time until its end, now, was spent on."""
        started = now if self.started is None else self.started
        first = now if self.first is None else self.first
        return Times(started - self.submitted, first - started, now - first, now - self.submitted)
