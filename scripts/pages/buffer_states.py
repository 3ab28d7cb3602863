"""Course machinery. Draws lesson 19's picture of a buffer's states from the table that the engine uses."""

from pathlib import Path

from scripts import ROOT
from scripts.traces.pictures import style

from mini_engine.handover.stage import Event, State, transitions

PICTURE = ROOT / "lessons" / "l19_handover" / "buffers.svg"
WIDTH, HEIGHT, BOX_W, BOX_H = 752, 330, 104, 44
PLACES = {State.FREE: (110, 90), State.LENT: (376, 90), State.FILLED: (642, 90), State.OWED: (376, 260)}
OWNERS = {
    State.FREE: "the receiver's",
    State.LENT: "the sender's",
    State.FILLED: "complete",
    State.OWED: "the sender's",
}
COLOURS = {State.FREE: "free", State.LENT: "held a", State.FILLED: "held b", State.OWED: "held d"}
# Each arrow's path, its label's x and y, and the label's alignment.
ARROWS = {
    (State.FREE, State.LENT): ("M162 80H320", 241, 72, "mid"),
    (State.LENT, State.FREE): ("M324 100H166", 241, 118, "mid"),
    (State.LENT, State.FILLED): ("M428 90H586", 509, 82, "mid"),
    (State.FILLED, State.FREE): ("M642 68V26H110V64", 376, 18, "mid"),
    (State.LENT, State.OWED): ("M376 112V234", 384, 178, ""),
    (State.OWED, State.FREE): ("M324 260H110V116", 216, 252, "mid"),
    (State.FILLED, State.FILLED): ("M670 112V146H614V116", 642, 164, "mid"),
    (State.OWED, State.OWED): ("M428 250H466V270H432", 474, 264, ""),
}
SENDERS = (Event.FILL, Event.END, Event.LOSE)


def edges() -> dict[tuple[State, State], list[Event]]:
    """Return the events that lead from one state to another.

    Raises:
        ValueError: the table has a transition without an arrow in this picture, or the other way round.
    """
    found: dict[tuple[State, State], list[Event]] = {}
    for (before, event), after in transitions().items():
        found.setdefault((before, after), []).append(event)
    if found.keys() != ARROWS.keys():
        raise ValueError(f"the table and the picture differ in {found.keys() ^ ARROWS.keys()}; change ARROWS")
    return found


def words(events: list[Event]) -> str:
    """Return an arrow's label: the sender's events in italics."""
    parts = [f'<tspan font-style="italic">{one.value}</tspan>' if one in SENDERS else one.value for one in events]
    return ", ".join(parts)


def picture() -> str:
    """Return the SVG."""
    said = "; ".join(
        f"{before.value} to {after.value}: {', '.join(event.value for event in events)}"
        for (before, after), events in edges().items()
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="kv-art" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="The states of a buffer. {said}">'
    )
    lines = [head, f"<style>{style()}\n.way {{ fill: none; stroke: var(--kv-ink); stroke-width: 1.5 }}\n"]
    lines[-1] += ".tip { fill: var(--kv-ink) }</style>"
    lines.append(
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path class="tip" d="M0 0L8 4L0 8Z"/></marker></defs>'
    )
    lines.append(f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="12"/>')
    for way, events in edges().items():
        d, x, y, align = ARROWS[way]
        lines.append(f'<path class="way" marker-end="url(#tip)" d="{d}"/>')
        lines.append(f'<text class="label {align}" transform="translate({x} {y})">{words(events)}</text>')
    for state, (x, y) in PLACES.items():
        left, top = x - BOX_W // 2, y - BOX_H // 2
        shape = f'width="{BOX_W}" height="{BOX_H}" rx="4" transform="translate({left} {top})"'
        lines.append(f'<rect class="{COLOURS[state]}" {shape}/>')
        lines.append(f'<text class="label mid strong" transform="translate({x} {y - 2})">{state.value}</text>')
        lines.append(f'<text class="small mid" transform="translate({x} {y + 14})">{OWNERS[state]}</text>')
    note = "upright: what the receiver does; italic: the sender's word, or its death (lose)"
    lines.append(f'<text class="small muted" transform="translate(20 314)">{note}</text>')
    return "\n".join([*lines, "</svg>", ""])


def files() -> dict[Path, str]:
    """Return the text that the picture should have."""
    return {PICTURE: picture()}
