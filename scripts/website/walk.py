"""Course machinery. Walks the website like a first-time visitor: ten seconds, ten minutes, the first lesson.

    python -m scripts.website.walk                 # walk in Chromium on a desktop and a phone; print what took how long
    python -m scripts.website.walk --keep          # the screenshots replace those of site/walk

Every step does what a reader would do, waits for what they would wait for, and fails if it does not come. The site is
built strictly and served on this machine; its downloads take no time here, so seconds are the page's own.
"""

import argparse
import io
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from scripts import ROOT, first_line
from scripts.website import live
from scripts.website.browser import PHONE, BuildError, Site, build_sites, find_browser, launched, served, visiting

from rich.console import Console

from lessons._course.tables import Column, show

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

KEPT = ROOT / "site" / "walk"
WIDTHS = {"desktop": 1440, "phone": PHONE}
PATIENCE_MS = 120_000  # for Python to start on a busy machine
QUALITY = 60  # of a kept screenshot
WRONG, RIGHT = "int(logits.argmin())", "int(logits.argmax())"  # what a reader may write for lesson 0's first task


@dataclass
class Walk:
    """One visitor at one width. steps: their names and seconds; pictures: as WebP, by step."""

    page: "Page"
    site: Site
    steps: list[tuple[str, float]] = field(default_factory=list)
    pictures: list[bytes] = field(default_factory=list)

    def step(self, says: str, do: Callable[[], object]) -> None:
        """Do something, and look at the page."""
        begun = time.perf_counter()
        do()
        self.steps.append((says, time.perf_counter() - begun))
        self.page.wait_for_timeout(400)  # a smooth scroll, a faded box
        self.pictures.append(as_webp(self.page.screenshot()))

    def to_top(self, place: "Locator") -> None:
        place.evaluate("node => scrollTo({top: node.getBoundingClientRect().top + scrollY - 70, behavior: 'instant'})")


def as_webp(png: bytes) -> bytes:
    from PIL.Image import open as decoded

    out = io.BytesIO()
    decoded(io.BytesIO(png)).convert("RGB").save(out, "WEBP", quality=QUALITY)
    return out.getvalue()


def ten_seconds(walk: Walk) -> None:
    page = walk.page
    walk.step("the first screen", lambda: page.goto(walk.site.url(), wait_until="networkidle"))
    race = page.locator(".kv-race")
    walk.to_top(race)
    walk.step("the race and the chats", lambda: page.locator(".kv-chats__say", has_text="A square is").wait_for())


def ten_minutes(walk: Walk) -> None:
    page = walk.page
    touch, model = page.locator(".kv-touch"), page.locator(".kv-model")

    def check(line: str, verdict: str) -> None:
        touch.locator("input").fill(line)
        touch.get_by_role("button", name="Check").click()
        page.locator(f".kv-touch.{verdict}").wait_for()

    def ask(words: str) -> None:
        model.get_by_label("Prompt").first.fill(words)
        model.locator(".kv-live-go").click()
        page.locator(".kv-model:not([aria-busy]) .kv-model-text strong").wait_for()
        page.locator(".kv-model + .kv-figure svg.kv-art").wait_for()

    def chat() -> None:
        page.get_by_role("button", name="Try chats of your own").click()
        page.locator(".kv-figure[data-trace=lab-tree]").wait_for()
        lab = page.locator("#lab-tree")
        lab.locator(".kv-live-prompt input").fill("What is the capital of Peru?")
        lab.get_by_role("button", name="Arrive").click()
        page.locator("#lab-tree:not([aria-busy])").wait_for()

    walk.to_top(touch)
    walk.step("a first line, wrong", lambda: check(WRONG, "wrong"))
    walk.step("a first line, right", lambda: check(RIGHT, "right"))
    walk.to_top(model)
    walk.step("the model answers", lambda: ask("What is the capital of Japan?"))
    walk.step("a chat of one's own arrives in the lab", chat)
    walk.step("the map of lessons", lambda: walk.to_top(page.locator(".kv-map")))


def first_lesson(walk: Walk) -> None:
    page, box = walk.page, walk.page.locator("#exercise-1-4")
    verdict = box.locator(".kv-live-verdict")

    def play() -> None:
        page.evaluate("KvPlayer.pace = 0.02")
        figure = page.locator(".kv-figure").first
        walk.to_top(figure)
        figure.get_by_role("button", name="Play").click()
        page.wait_for_function(AT_ITS_END, arg=figure.element_handle())

    def start() -> None:
        box.locator(".kv-live-go").click()
        box.locator(".cm-content").wait_for()
        walk.to_top(box)

    def write(was: str, line: str, kind: str) -> None:
        """Replace the line that begins with `was`, and check."""
        box.evaluate(WRITE, [was, line])
        box.get_by_role("button", name="Check").click()
        box.locator(f".kv-live-verdict.{kind}").wait_for()
        walk.to_top(verdict)

    def done() -> None:
        page.get_by_role("button", name="Mark lesson 0 as done").click()
        page.goto(walk.site.url(), wait_until="networkidle")
        walk.to_top(page.locator(".kv-map"))

    walk.step("lesson 0", lambda: page.goto(walk.site.url("l0_the_loop/README.md"), wait_until="networkidle"))
    walk.step("its player, played to the end", play)
    walk.step("the exercise", start)
    walk.step("a wrong body", lambda: write("raise NotImplementedError", f"return {WRONG}", "bad"))
    walk.step("a right one: the next task is open", lambda: write("return", f"return {RIGHT}", "open"))
    walk.step("the lesson is done, and the map says so", done)


AT_ITS_END = "node => new Set(node.querySelector('.kv-number').innerText.split(' / ')).size === 1"
WRITE = """(box, [was, line]) => {
    const lines = box.exercise.text.split("\\n");
    const at = lines.findIndex(text => text.trim().startsWith(was));
    lines[at] = "    " + line;
    box.exercise.text = lines.join("\\n");
}"""
PARTS = {"ten seconds": ten_seconds, "ten minutes": ten_minutes, "the first lesson": first_lesson}


def walked(browser, site: Site, width: int) -> tuple[list[dict], list[bytes]]:
    """Walk at one width. Returns the steps, each with its part and seconds, and a screenshot after each.

    Raises:
        playwright's errors: what a reader waits for did not come.
        AssertionError: the console has an error, or another host was asked.
    """
    rows: list[dict] = []
    with visiting(browser, site, width=width, has_touch=width == PHONE) as visitor:
        visitor.page.set_default_timeout(PATIENCE_MS)
        walk = Walk(visitor.page, site)
        for part, go in PARTS.items():
            before = len(walk.steps)
            go(walk)
            rows += [{"part": part, "step": says, "seconds": round(took, 1)} for says, took in walk.steps[before:]]
        assert not visitor.complaints, "\n".join(visitor.complaints)
    return rows, walk.pictures


def name_of(i: int, row: dict) -> str:
    """Return the name of a step's screenshot, without the ending."""
    return f"{i:02}-" + re.sub(r"\W+", "-", row["step"].lower()).strip("-")


def keep(kind: str, rows: list[dict], pictures: list[bytes], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{kind}-*.webp"):
        old.unlink()
    for i, (row, picture) in enumerate(zip(rows, pictures, strict=True), 1):
        (folder / f"{kind}-{name_of(i, row)}.webp").write_bytes(picture)


def print_rows(found: dict[str, list[dict]]) -> None:
    print("A stranger's way through the site; seconds without the network's:")
    rows = next(iter(found.values()))
    columns = [Column("", is_text=True), Column("what the reader does", is_text=True), *map(Column, found)]
    table = [
        [row["part"], row["step"], *(f"{rows[i]['seconds']:.1f}" for rows in found.values())]
        for i, row in enumerate(rows)
    ]
    show(Console(highlight=False), columns, table)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=first_line(__doc__).removeprefix("Course machinery. "))
    parser.add_argument("--keep", action="store_true", help=f"put the screenshots into {KEPT.relative_to(ROOT)}")
    parser.add_argument("--out", type=Path, metavar="DIR", help="put the screenshots there")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    executable = find_browser()
    if executable is None:
        print("walk: no browser found; put Chromium or Chrome on the PATH.", file=sys.stderr)
        return 2
    if not live.is_complete():
        print("walk: it needs Python for the pages: python -m scripts.website.live", file=sys.stderr)
        return 2
    found: dict[str, list[dict]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            build_sites({"http": Path(folder)})
        except BuildError as error:
            print(error, file=sys.stderr)
            return 1
        with served(Path(folder)) as base, launched(executable) as browser:
            for kind, width in WIDTHS.items():
                found[kind], pictures = walked(browser, Site(Path(folder), base, is_file=False), width)
                for where in filter(None, (KEPT if args.keep else None, args.out)):
                    keep(kind, found[kind], pictures, where)
    print(json.dumps(found)) if args.json else print_rows(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
