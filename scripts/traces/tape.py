"""Course machinery. The base of recorders and labs: frames to draw, captions, and questions.

A recorder is a subclass of Tape in a module of this folder, named in `record.py`; `work.py` is a short one. Its
`__init__` names the trace and builds the engine's parts; `state` returns what every frame shows of them; `record` runs
them and calls `show` wherever a reader should look. It runs the engine's own code and computes nothing that the engine
can: otherwise a bug would not show. Its lesson's page links the picture to the trace.

A trace is a script, `x.trace.js`, that puts one object into `window.KV_TRACES`, because a page opened from a file can
load scripts but no other data. It is the same on every machine: no times, fixed seeds, sorted keys.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

VERSION = 1
MOST_FRAMES = 60
Ask = dict[str, Any]


class Tape:
    """A trace being recorded.

    id: its name in a page, such as `l2-pool`. file: its path below lessons/. kind: the view that draws it, a file in
    site/theme/assets/player/views/. scene: state common to all frames. poster: the frame that a player opens on, and
    the picture where scripts do not run.
    """

    def __init__(self, id: str, file: str, kind: str, title: str, poster: int = 0, /, **scene: Any) -> None:
        self.id, self.file, self.kind, self.title, self.poster = id, file, kind, title, poster
        self.scene, self.frames = scene, list[dict[str, Any]]()

    def record(self) -> None:
        """Run the engine and add frames."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Return the engine's current state for a frame: JSON values, copied, under the same keys in every frame."""
        return {}

    def show(self, say: str, code: str = "", question: Ask | None = None, **state: Any) -> None:
        """Add a frame: `state()` and `state`.

        Args:
            code: the function that made the frame, such as `mini_engine/kv/allocator.py::BlockAllocator.free`. The
                website links to its lines (scripts/website/player_links.py), so that a trace survives when they move.
            question: asked before the frame is shown; from `ask`.

        Raises:
            RuntimeError: there are too many frames; the recorded code may never end.
        """
        if len(self.frames) == MOST_FRAMES:
            raise RuntimeError(f"it goes on for more than {MOST_FRAMES} steps")
        frame = {"say": say} | ({"code": code} if code else {}) | self.state() | state
        self.frames.append(frame | {"ask": question} if question else frame)

    def stopped(self, error: BaseException) -> None:
        """Add a frame that reports the failure of the recorded code."""
        last = {key: value for key, value in (self.frames[-1] if self.frames else {}).items() if key != "ask"}
        self.frames.append(last | {"say": f"Here your code stopped: {type(error).__name__}: {error}"})

    @cached_property
    def model(self):
        """The pocket model."""
        from mini_engine.families.qwen3 import load_model  # here, because a page has no tensors
        from mini_engine.pocket import POCKET_DIR

        return load_model(POCKET_DIR)

    @cached_property
    def tokenizer(self):
        """The pocket model's tokenizer."""
        from mini_engine.pocket import POCKET_DIR
        from mini_engine.text.tokenizer import Tokenizer

        return Tokenizer(POCKET_DIR)

    def words(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token's text, without spaces around it."""
        return [self.tokenizer.decode([token]).strip() for token in token_ids]

    @property
    def data(self) -> dict[str, Any]:
        """Return the trace in the form that players read."""
        return {name: getattr(self, name) for name in ("id", "file", "kind", "title", "poster", "scene", "frames")}

    @property
    def text(self) -> str:
        """Return the file's text, one frame per line."""
        head = {**self.data, "version": VERSION}
        frames = ",\n".join(map(dump, head.pop("frames")))
        pairs = "".join(f"{dump(key)}: {dump(value)},\n" for key, value in sorted(head.items()))
        return (
            "// Recorded by scripts/traces/record.py: do not edit, record again.\n"
            "window.KV_TRACES = window.KV_TRACES || {};\n"
            f'window.KV_TRACES[{dump(self.id)}] = {{\n{pairs}"frames": [\n{frames}\n]}};\n'
        )


def dump(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def read_trace(text: str) -> dict[str, Any]:
    """Return the trace in a trace file's text."""
    body = text.split("] = ", 1)[1]
    return json.loads(body[: body.rindex(";")])


def ask(question: str, right: Any, others: Sequence[Any], why: str) -> Ask | None:
    """Return a question whose correct answer comes from the run. Options are sorted, so position gives nothing away.

    None if no wrong option remains: the run's answer was the only one.
    """
    options = sorted({str(right), *map(str, others)}, key=in_order)
    if len(options) == 1:
        return None
    return {"question": question, "options": options, "right": options.index(str(right)), "why": why}


def in_order(text: str) -> tuple[float, str]:
    """Sort key: numbers by value, then words alphabetically."""
    head = text.split(" ", 1)[0].replace(",", "")
    return (float(head) if head.lstrip("-").isdigit() else float("inf"), text)


def plural(count: int, word: str) -> str:
    """Return "1 block", "3 blocks"."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def listed(values: Sequence[Any], one: str = "", many: str = "") -> str:
    """Return "4", "4 and 1", "4, 1 and 0"; with a verb for one and for many: "A waits", "A and B wait"."""
    words = [str(value) for value in values]
    text = " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
    return f"{text} {one if len(words) == 1 else many}" if one and words else text


def ranges(values: Sequence[int]) -> str:
    """Return "0 … 4, 9": runs of numbers in the given order, with no line break inside a run."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(f"{run[0]}\u00a0…\u00a0{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
