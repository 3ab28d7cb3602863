"""Course machinery. A trace: frames with a state to draw, a sentence that says what happened, and sometimes a question.

A trace is a script, `x.trace.js`, that puts one object into `window.KV_TRACES`, because a page opened from a file can
load scripts but no other data. It is the same on every machine: no times, fixed seeds, sorted keys.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

VERSION = 1
MOST_FRAMES = 60


@dataclass(frozen=True)
class Ask:
    """A question asked before its frame is shown. right: the index of the correct one of 2 to 4 options."""

    question: str
    options: Sequence[str]
    right: int
    why: str

    def as_dict(self) -> dict[str, Any]:
        return {"question": self.question, "options": list(self.options), "right": self.right, "why": self.why}


def ask(question: str, right: Any, others: Sequence[Any], why: str) -> Ask | None:
    """Return a question whose correct answer comes from the run. Options are sorted, so position gives nothing away.

    None if no wrong option remains: the run's answer was the only one.
    """
    others = list(dict.fromkeys(map(str, others)))
    if str(right) in others:
        others.remove(str(right))
    if not others:
        return None
    options = sorted([str(right), *others], key=in_order)
    return Ask(question, options, options.index(str(right)), why)


def in_order(text: str) -> tuple[float, str]:
    """Sort key: numbers by value, then words alphabetically."""
    head = text.split(" ", 1)[0].replace(",", "")
    return (float(head) if head.lstrip("-").isdigit() else float("inf"), text)


@dataclass
class Tape:
    """A trace being recorded.

    id: its name in a page, such as `l2-pool`. file: its path below lessons/. kind: the view that draws it.
    scene: state common to all frames. poster: the frame that a player opens on, and the picture where scripts
    do not run.
    """

    id: str
    file: str
    kind: str
    title: str
    scene: dict[str, Any]
    poster: int = 0
    frames: list[dict[str, Any]] = field(default_factory=list)

    def frame(self, say: str, question: Ask | None = None, code: str = "", **state: Any) -> None:
        """Add a frame.

        Args:
            question: asked before it.
            code: the function that made the frame, such as `mini_engine/kv/allocator.py::BlockAllocator.free`. The
                website links to its lines (scripts/website/player_links.py), so that a trace survives when they move.

        Raises:
            RuntimeError: there are too many frames; the recorded code may never end.
        """
        if len(self.frames) == MOST_FRAMES:
            raise RuntimeError(f"it goes on for more than {MOST_FRAMES} steps")
        frame = {"say": say} | ({"code": code} if code else {}) | state
        self.frames.append(frame | {"ask": question.as_dict()} if question else frame)

    def stopped(self, error: BaseException) -> None:
        """Add a frame that says that the recorded code has failed."""
        last = {key: value for key, value in (self.frames[-1] if self.frames else {}).items() if key != "ask"}
        self.frames.append(last | {"say": f"Here your code stopped: {type(error).__name__}: {error}"})

    @property
    def text(self) -> str:
        """The file's text, one frame per line."""
        head = {"file": self.file, "id": self.id, "kind": self.kind, "poster": self.poster}
        head |= {"scene": self.scene, "title": self.title}
        pairs = [f"{dump(key)}: {dump(value)}" for key, value in sorted((head | {"version": VERSION}).items())]
        frames = ",\n".join(map(dump, self.frames))
        return "\n".join(
            [
                "// Recorded by scripts/traces/record.py: do not edit, record again.",
                "window.KV_TRACES = window.KV_TRACES || {};",
                f"window.KV_TRACES[{dump(self.id)}] = {{",
                *(pair + "," for pair in pairs),
                f'"frames": [\n{frames}\n]}};\n',
            ]
        )


def dump(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def read_trace(text: str) -> dict[str, Any]:
    """Return the trace in a trace file's text."""
    body = text.split("] = ", 1)[1]
    return json.loads(body[: body.rindex(";")])


Record = Callable[[Tape], None]


def plural(count: int, word: str) -> str:
    """Return "1 block", "3 blocks"."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def listed(values: Sequence[Any]) -> str:
    """Return "4", "4 and 1", "4, 1 and 0"."""
    words = [str(value) for value in values]
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def ranges(values: Sequence[int]) -> str:
    """Return "0 … 4, 9": runs of numbers in the given order, with no line break inside a run."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(f"{run[0]}\u00a0…\u00a0{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
