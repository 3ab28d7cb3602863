"""Course machinery. Draws a trace's pictures for places where scripts do not run, by the player's view.

One frame stands for the whole trace. If its page's text follows the trace (followed.py), a second file has a still of
each frame that the text describes.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scripts import ROOT
from scripts.traces.followed import followed_frames
from scripts.traces.tape import Tape
from scripts.website.browser import find_browser, launched

PLAYER = ROOT / "site" / "theme" / "assets" / "player"
WIDTH, STILL_WIDTH, MARGIN = 720, 600, 16
SEAL = re.compile(r"<!-- drawn from ([0-9a-f]{16}) -->")


def picture_path(trace_path: Path) -> Path:
    return trace_path.with_name(trace_path.name.replace(".trace.js", ".svg"))


def stills_path(trace_path: Path) -> Path:
    return trace_path.with_name(trace_path.name.replace(".trace.js", ".frames.svg"))


def seal(tape: Tape, frames: Sequence[int] = ()) -> str:
    """Return a digest of everything a picture depends on: the trace, the view, the drawing code and the style.

    Args:
        frames: those of a file of stills. The trace itself names the one that stands for it.
    """
    core = (PLAYER / "player.js").read_text(encoding="utf-8").partition("// ---- the player")[0]
    view = (PLAYER / "views" / f"{tape.kind}.js").read_text(encoding="utf-8")
    return hashlib.sha256("\n".join((tape.text, *map(str, frames), core, view, style())).encode()).hexdigest()[:16]


def pictures_of(path: Path) -> dict[Path, list[int]]:
    """Return the pictures that belong beside the trace at `path`, and of a file of stills its frames."""
    frames = followed_frames(path)
    return {picture_path(path): []} | ({stills_path(path): frames} if frames else {})


def is_current(path: Path, tape: Tape) -> bool:
    """Return True if the file at `path` equals this trace and its pictures were drawn from it."""
    if not path.is_file() or path.read_text(encoding="utf-8") != tape.text:
        return False
    for picture, frames in pictures_of(path).items():
        mark = SEAL.search(picture.read_text(encoding="utf-8")) if picture.is_file() else None
        if mark is None or mark[1] != seal(tape, frames):
            return False
    return True


def draw_all(tapes: Sequence[Tape], lessons: Path) -> int:
    """Write the pictures. Return the exit code: 1 if there is no browser to draw them in."""
    browser_path = find_browser()
    if browser_path is None or find_spec("playwright") is None:
        print("the pictures were not drawn; this needs Chromium, and Playwright (python -m pip install playwright)")
        return 1
    with launched(browser_path) as browser:
        for tape in tapes:
            for path, frames in pictures_of(lessons / tape.file).items():
                text = stills(browser, tape, frames) if frames else poster(browser, tape)
                path.write_text(text, encoding="utf-8", newline="\n")
                print(f"drew {path.relative_to(ROOT)}")
    return 0


def draw(browser, tape: Tape, frames: Sequence[int], width: int) -> list[dict[str, Any]]:
    """Return what the view draws in each frame: its lines of SVG, and its size with a margin."""
    page = browser.new_page()
    page.set_content("<!doctype html><title>trace</title>")
    for name in ("player.js", f"views/{tape.kind}.js"):
        page.add_script_tag(content=(PLAYER / name).read_text(encoding="utf-8"))
    page.add_script_tag(content=tape.text)
    call = "([id, frames, width]) => frames.map(frame => KvPlayer.picture(KV_TRACES[id], frame, width))"
    drawn = page.evaluate(call, [tape.id, list(frames), width])
    page.close()
    return [one | {"wide": one["width"] + 2 * MARGIN, "high": one["height"] + 2 * MARGIN} for one in drawn]


def poster(browser, tape: Tape) -> str:
    """Return the SVG of the frame that stands for the trace."""
    (drawn,) = draw(browser, tape, [tape.poster], WIDTH)
    label = f' role="img" aria-label="{escape(tape.title + ". " + tape.frames[tape.poster]["say"])}"'
    shapes = [panel(drawn, 0), f'<g transform="translate({MARGIN} {MARGIN})">', *drawn["lines"], "</g>"]
    return whole(drawn["wide"], drawn["high"], label, seal(tape), drawn["defs"], shapes)


def stills(browser, tape: Tape, frames: Sequence[int]) -> str:
    """Return the SVG of several frames, one below the other, each a view by its name: `#frame-3`.

    What several frames draw alike is written once, in a group of the class that the rules for shapes ask for: they do
    not look beyond what is used.
    """
    drawn = draw(browser, tape, frames, STILL_WIDTH)
    often = Counter(line for one in drawn for line in dict.fromkeys(one["lines"]))
    shared = {line: f"s{number}" for number, line in enumerate(line for line in often if often[line] > 1)}
    defs = drawn[0]["defs"] + "".join(f'\n<g id="{name}" class="kv-art">{line}</g>' for line, name in shared.items())
    shapes, top = [], 0
    for frame, one in zip(frames, drawn, strict=True):
        lines = [f'<use href="#{shared[line]}"/>' if line in shared else line for line in one["lines"]]
        shapes += [f'<view id="frame-{frame}" viewBox="0 {top} {one["wide"]} {one["high"]}"/>', panel(one, top)]
        shapes += [f'<g transform="translate({MARGIN} {top + MARGIN})">', *lines, "</g>"]
        top += one["high"]
    return whole(drawn[0]["wide"], top, "", seal(tape, frames), defs, shapes)


def panel(drawn: dict[str, Any], top: int) -> str:
    place = f'y="{top}" ' if top else ""
    return f'<rect class="page" {place}width="{drawn["wide"]}" height="{drawn["high"]}" rx="12"/>'


def whole(wide: int, high: int, label: str, mark: str, defs: str, shapes: list[str]) -> str:
    """Return the text of a picture."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="kv-art" viewBox="0 0 {wide} {high}"{label}>',
            f"<!-- drawn from {mark} -->",
            f"<style>{style()}</style>",
            f"<defs>{defs}</defs>",
            *shapes,
            "</svg>",
            "",
        ]
    )


def style() -> str:
    """Return the colours of both schemes and the rules for shapes, taken from the player's style sheet."""
    text = (PLAYER / "player.css").read_text(encoding="utf-8")
    light, dark = (block.group(1) for block in re.finditer(r":where\([^{]*\) \{\s*(--kv-a:[^}]*)\}", text))
    shapes = text.partition("/* shapes")[2].partition("*/")[2].strip()
    return (
        f":root {{ {light.strip()} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark.strip()} }} }}\n"
        f".page {{ fill: var(--kv-panel); stroke: var(--kv-line) }}\n{shapes}"
    )
