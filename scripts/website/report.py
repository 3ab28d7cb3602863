"""Course machinery. Measures the website's size and first paint, and takes screenshots of its pages.

The site is built strictly, served on this machine and opened in Chromium with an empty cache. Sizes are the bytes that
the server sends, uncompressed; the time is the browser's `first-contentful-paint`, the median of a few loads.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from scripts import ROOT, first_line
from scripts.website.browser import (
    DESKTOP,
    PHONE,
    BuildError,
    Site,
    build_sites,
    find_browser,
    launched,
    served,
    visiting,
)

from rich.console import Console

from lessons._course.tables import Column, show

FONTS = (".woff2", ".woff", ".ttf")
FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint').map(entry => entry.startTime)[0]"


def measure(browser, site: Site, source: str, loads: int) -> dict:
    """Measure bytes and milliseconds of one page, each load with an empty cache."""
    paints, bytes_without_fonts, bytes_of_fonts = [], 0, 0
    for _ in range(loads):
        sent: dict[str, int] = {}
        with visiting(browser, site) as visitor:
            visitor.page.on("response", lambda reply, sent=sent: sent.update({reply.url: len(reply.body())}))
            visitor.page.goto(site.url(source), wait_until="networkidle")
            paints.append(visitor.page.evaluate(FIRST_PAINT))
        bytes_of_fonts = sum(size for url, size in sent.items() if url.endswith(FONTS))
        bytes_without_fonts = sum(sent.values()) - bytes_of_fonts
    return {
        "page": source,
        "kb_without_fonts": round(bytes_without_fonts / 1000, 1),
        "kb_of_fonts": round(bytes_of_fonts / 1000, 1),
        "first_paint_ms": round(median(paints)),
    }


def shoot(browser, site: Site, source: str, folder: Path) -> None:
    """Take screenshots of a whole page, in both schemes and at the widths of a phone and a laptop."""
    name = source.removesuffix(".md").removesuffix("/README").replace("/", "-").lower()
    for scheme in ("light", "dark"):
        with visiting(browser, site, scheme=scheme, reduced_motion="reduce") as visitor:
            for kind, width in (("desktop", DESKTOP), ("phone", PHONE)):
                visitor.page.set_viewport_size({"width": width, "height": 844})
                visitor.page.goto(site.url(source), wait_until="networkidle")
                visitor.page.screenshot(path=folder / f"{name}-{kind}-{scheme}.png", full_page=True)


def print_rows(rows: list[dict]) -> None:
    print("The site, each page with an empty cache:")
    titles = ("page", "kB without fonts", "kB of fonts", "first paint, ms")
    columns = [Column(title, is_text=title == "page") for title in titles]
    show(Console(highlight=False), columns, [[str(value) for value in row.values()] for row in rows])


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=first_line(__doc__).removeprefix("Course machinery. "))
    parser.add_argument("--only", default="", metavar="TEXT", help="only pages whose path begins with TEXT")
    parser.add_argument("--loads", type=int, default=3, help="loads per page; the median time counts (default: 3)")
    parser.add_argument("--shots", action="store_true", help="also write screenshots of each page to build/shots")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser.parse_args(argv)


def report(args: argparse.Namespace, executable: str, folder: Path) -> list[dict]:
    build_sites({"http": folder / "site"})
    shots = ROOT / "build" / "shots"
    shots.mkdir(parents=True, exist_ok=True)
    with served(folder / "site") as base, launched(executable) as browser:
        site = Site(folder / "site", base, is_file=False)
        chosen = [source for source in site.pages if source.startswith(args.only)]
        rows = [measure(browser, site, source, args.loads) for source in chosen]
        for source in chosen if args.shots else []:
            shoot(browser, site, source, shots)
    return rows


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    executable = find_browser()
    if executable is None:
        print("report: no browser found; put Chromium or Chrome on the PATH.", file=sys.stderr)
        return 2
    try:
        with tempfile.TemporaryDirectory() as folder:
            rows = report(args, executable, Path(folder))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps({"pages": rows}))
    else:
        print_rows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
