"""Course machinery. The events of a lab as text that fits into an address: `+A=Once upon a time;.;.;-A`.

`+A=…` a request arrives, `-A` it ends or is aborted, `-2` leaf 2 is evicted, `!A=3` its table is cut to 3 tokens, `.`
one step, `*` steps until no request is left.
"""

import re
from dataclasses import dataclass

from mini_engine.base.errors import UserError

NAMES = "ABCDEF"
MOST_EVENTS = 200
MOST_TEXT = 160
EVENT = re.compile(r"([+!])([A-F])=(.+)|(-)([A-F]|[1-9])|([.*])", re.DOTALL)


@dataclass(frozen=True)
class Event:
    """One event. kind: one of `+ - ! . *`; text: what follows the equals sign."""

    kind: str
    name: str = ""
    text: str = ""

    def __str__(self) -> str:
        return f"{self.kind}{self.name}" + (f"={self.text}" if self.text else "")


def parse(text: str) -> list[Event]:
    """Read events.

    Raises:
        UserError: an event is invalid, or there are too many.
    """
    parts = [part for part in text.split(";") if part]
    if len(parts) > MOST_EVENTS:
        raise UserError(f"{len(parts)} events are too many; a lab takes {MOST_EVENTS}")
    return [event_of(part) for part in parts]


def event_of(part: str) -> Event:
    found = EVENT.fullmatch(part)
    if not found or len(part) > MOST_TEXT:
        raise UserError(f"{part[:40]!r} is no event; write +A=some words, -A, !A=3, . or *")
    return Event(found[1] or found[4] or found[6], found[2] or found[5] or "", found[3] or "")


def joined(events: list[Event]) -> str:
    return ";".join(map(str, events))


def whole_number(text: str, low: int, high: int, what: str) -> int:
    """Return the number in `text`.

    Raises:
        UserError: it is not a whole number, or outside low … high.
    """
    if not re.fullmatch(r"\s*\d{1,6}\s*", text) or not low <= int(text) <= high:
        raise UserError(f"{what} is {text!r}; give a whole number from {low} to {high}")
    return int(text)


def words_of(text: str) -> list[str]:
    """Split a prompt into the lab's tokens: a word or a punctuation mark each."""
    return re.findall(r"\w+|[^\w\s]", text)
