"""Course machinery. Measures each page of the website, and fails if one exceeds a limit.

python -m scripts.website.measure                        build the site, then measure all pages
python -m scripts.website.measure --site build/site      measure what is built
python -m scripts.website.measure --only l5_scheduler/README.md --json
python -m scripts.website.measure --verdicts             check each exercise as its page does, too: a quarter of an hour

1280, 390, 320: the share in percent of the least visible player, at 1280 x 720 (one that the page opens with as it
opens, or a tool, others scrolled to below the header), at 390 x 664 (scrolled) and at 320 x 568 (its width only).
KB: what a server that compresses text, as GitHub Pages does, sends for a first visit. faint: kinds of text in drawings,
on all frames of all players and in both schemes, whose contrast with what is below it is less than 4.5. tasks: those
with an editor in the page; with --verdicts, after a slash, how many of them are unwritten at first and pass with the
reference.
"""

import argparse
import contextlib
import gzip
import json
import re
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from scripts import ROOT
from scripts.live.in_node import PagePython, is_there, misjudged
from scripts.website.browser import BuildError, Site, build_sites, find_browser, launched, served, visiting
from scripts.website.live_links import exercises
from scripts.website.measures import FAINT, LEAST_CONTRAST, MOST_SHIFTED, SHIFTS, TALLEST, VISIBLE

from lessons._course.catalog import read_lesson

SIZES = {"1280": (1280, 720), "390": (390, 664), "320": (320, 568)}
MOST_KB = 360  # of a lesson
COMPRESSED = {".html", ".css", ".js", ".mjs", ".json", ".svg", ".xml"}
WORDS = "() => document.querySelector('.md-content').innerText.split(/\\s+/).length"
COLUMNS = ("page", "high", "words", "KB", "raw KB", "shift", *SIZES, "faint", "tasks")


def sent(paths: set[Path]) -> tuple[float, float]:
    """Return how many KB a server sends for these files, with text compressed, and how many they have."""
    files = [(path.suffix, path.read_bytes()) for path in paths]
    packed = sum(len(gzip.compress(data)) if suffix in COMPRESSED else len(data) for suffix, data in files)
    return packed / 1000, sum(len(data) for _, data in files) / 1000


def file_of(site: Site, url: str) -> Path:
    """Return the file of the build that a request asks for."""
    path = site.folder / urlsplit(url).path.lstrip("/")
    return path / "index.html" if path.is_dir() else path


def visible(page, name: str) -> float | None:
    """Return the share in percent of the least visible figure at one of SIZES, or None if there is none."""
    width, height = SIZES[name]
    page.set_viewport_size({"width": width, "height": height})
    return page.evaluate(VISIBLE, {"opens": name == "1280", "isWidthOnly": name == "320"})


def measured(browser, site: Site, source: str) -> dict:
    """Load a page in a new profile and return its figures by the names of COLUMNS."""
    asked: set[Path] = set()
    with visiting(browser, site, reduced_motion="reduce") as visitor:
        page = visitor.page
        page.on("request", lambda request: asked.add(file_of(site, request.url)))
        page.set_viewport_size({"width": 1280, "height": 720})
        page.goto(site.url(source), wait_until="networkidle")
        packed, raw = sent({path for path in asked if path.is_file()})
        shift = page.evaluate(SHIFTS)[0]
        words = page.evaluate(WORDS)
        shares = {name: visible(page, name) for name in SIZES}
        page.set_viewport_size({"width": 1440, "height": 900})
        high = page.evaluate("document.documentElement.scrollHeight")
        faint = len(page.evaluate(FAINT, LEAST_CONTRAST))
    text = (ROOT / "lessons" / source).read_text(encoding="utf-8")
    tasks = sum(map(len, exercises(text)))
    sizes = {"KB": round(packed), "raw KB": round(raw), "shift": round(shift, 3)}
    return {"page": source, "high": high, "words": words, **sizes, **shares, "faint": faint, "tasks": tasks}


def judge(row: dict, python: PagePython) -> None:
    """Check a lesson's exercises in the page's Python, and add what was found to its figures."""
    path = ROOT / "lessons" / row["page"]
    groups = exercises(path.read_text(encoding="utf-8"))
    row["misjudged"] = list(misjudged(python, read_lesson(path.with_name("lesson.toml")), groups)) if groups else []
    wrong = {text.partition(":")[0] for text in row["misjudged"]}
    row["passing"] = row["tasks"] - len(wrong)


def broken(row: dict) -> list[str]:
    """Return which limits a page exceeds."""
    is_lesson = re.match(r"l\d+_", row["page"]) is not None
    said = [f"{row['high']} pixels high, at most {TALLEST}"] if row["high"] > TALLEST else []
    if row["shift"] > MOST_SHIFTED:
        said.append(f"moves by {row['shift']} while it loads, at most {MOST_SHIFTED}")
    if is_lesson and row["KB"] > MOST_KB:
        said.append(f"{row['KB']} KB, at most {MOST_KB} for a lesson")
    said += [f"a figure at {name}: {row[name]} % visible" for name in SIZES if row[name] not in (None, 100)]
    if row["faint"]:
        said.append(
            f"{row['faint']} texts in drawings with a contrast below {LEAST_CONTRAST}, in both schemes together"
        )
    return [f"{row['page']}: {text}" for text in said + row.get("misjudged", [])]


def show(rows: list[dict]) -> None:
    """Print a table of at most 80 columns."""
    widths = (23, 6, 6, 4, 6, 5, 4, 3, 3, 5, 5)
    for row in ({name: name for name in COLUMNS}, *rows):
        cells = ["–" if row[name] is None else str(row[name]) for name in COLUMNS]
        cells[-1] += f"/{row['passing']}" if row["tasks"] and "passing" in row else ""
        name = cells[0].removesuffix("/README.md")[: widths[0]].ljust(widths[0])
        print(" ".join([name, *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))]))


def measure(folder: Path, only: list[str]) -> list[dict]:
    """Measure the pages of a build, with a line of progress."""
    executable = find_browser()
    if executable is None:
        raise BuildError("needs Chromium or Chrome on the PATH: on Debian and Ubuntu, apt-get install chromium")
    rows = []
    with served(folder) as base, launched(executable) as browser:
        site = Site(folder, base, is_file=False)
        sources = only or site.pages
        for source in sources:
            print(f"\r{len(rows) + 1} of {len(sources)} pages ", end="", file=sys.stderr, flush=True)
            rows.append(measured(browser, site, source))
    print(file=sys.stderr)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, metavar="DIR", help="a build of the site, made for a server")
    parser.add_argument("--only", action="append", default=[], metavar="PAGE", help="a page's source; repeatable")
    parser.add_argument("--verdicts", action="store_true", help="check the exercises, too; needs Node")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args(argv)
    if args.verdicts and not is_there():
        parser.error("--verdicts needs Node, and Pyodide: python -m scripts.website.live")
    try:
        with tempfile.TemporaryDirectory() as made:
            if args.site is None:
                build_sites({"http": Path(made)})
            rows = measure(args.site or Path(made), args.only)
    except BuildError as error:
        print(f"measure: {error}", file=sys.stderr)
        return 2
    if args.verdicts:
        with contextlib.closing(PagePython()) as python:
            for row in rows:
                judge(row, python)
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        show(rows)
    said = [text for row in rows for text in broken(row)]
    print("\n".join(said), file=sys.stderr)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
