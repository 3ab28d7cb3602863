"""Course machinery. Draws a trace's picture for places where scripts do not run: one frame, by the player's view."""

import hashlib
import re
from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path

from scripts import ROOT
from scripts.traces.tape import Tape
from scripts.website.browser import find_browser, launched

PLAYER = ROOT / "site" / "theme" / "assets" / "player"
WIDTH, MARGIN = 720, 16
SEAL = re.compile(r"<!-- drawn from ([0-9a-f]{16}) -->")


def picture_path(trace_path: Path) -> Path:
    return trace_path.with_name(trace_path.name.replace(".trace.js", ".svg"))


def seal(tape: Tape) -> str:
    """Return a digest of everything the picture depends on: the trace, the view, the drawing code and the style."""
    core = (PLAYER / "player.js").read_text(encoding="utf-8").partition("// ---- the player")[0]
    view = (PLAYER / "views" / f"{tape.kind}.js").read_text(encoding="utf-8")
    return hashlib.sha256("\n".join((tape.text, core, view, style())).encode()).hexdigest()[:16]


def is_current(path: Path, tape: Tape) -> bool:
    """Return True if the file at `path` equals this trace and its picture was drawn from it."""
    picture = picture_path(path)
    if not path.is_file() or path.read_text(encoding="utf-8") != tape.text or not picture.is_file():
        return False
    mark = SEAL.search(picture.read_text(encoding="utf-8"))
    return mark is not None and mark[1] == seal(tape)


def draw_all(tapes: Sequence[Tape], lessons: Path) -> int:
    """Write the pictures. Return the exit code: 1 if there is no browser to draw them in."""
    browser_path = find_browser()
    if browser_path is None or find_spec("playwright") is None:
        print("the pictures were not drawn; this needs Chromium, and Playwright (python -m pip install playwright)")
        return 1
    with launched(browser_path) as browser:
        for tape in tapes:
            path = picture_path(lessons / tape.file)
            path.write_text(draw(browser, tape), encoding="utf-8", newline="\n")
            print(f"drew {path.relative_to(ROOT)}")
    return 0


def draw(browser, tape: Tape) -> str:
    """Return the picture's SVG."""
    page = browser.new_page()
    page.set_content("<!doctype html><title>trace</title>")
    for name in ("player.js", f"views/{tape.kind}.js"):
        page.add_script_tag(content=(PLAYER / name).read_text(encoding="utf-8"))
    page.add_script_tag(content=tape.text)
    drawn = page.evaluate(
        "([id, frame, width]) => KvPlayer.picture(KV_TRACES[id], frame, width)", [tape.id, tape.poster, WIDTH]
    )
    page.close()
    wide, high = drawn["width"] + 2 * MARGIN, drawn["height"] + 2 * MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="kv-art" viewBox="0 0 {wide} {high}" role="img" '
            f'aria-label="{escape(tape.title + ". " + tape.frames[tape.poster]["say"])}">',
            f"<!-- drawn from {seal(tape)} -->",
            f"<style>{style()}</style>",
            f"<defs>{drawn['defs']}</defs>",
            f'<rect class="page" width="{wide}" height="{high}" rx="12"/>',
            f'<g transform="translate({MARGIN} {MARGIN})">',
            *drawn["lines"],
            "</g>",
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
