"""Course machinery. The website as readers see it: each page, light and dark, wide and narrow, served and from disk.

Protects readers on a phone, in the dark, with a screen reader, without a network: a page must be whole for each of
them. No test depends on how fast a browser shows a page. All of it is nightly; test_visits.py visits each page once.
"""

import gzip
import re
from urllib.parse import urlsplit

from scripts.website.browser import visiting
from scripts.website.formulas import as_text

import pytest

from tests.course.looks import SOURCES, each_way, looked_over

MOST_KB = 360  # of a lesson, in a first visit
COMPRESSED = {".html", ".css", ".js", ".mjs", ".json", ".svg", ".xml"}
each_page = pytest.mark.parametrize("source", SOURCES)


@each_page
@each_way
def test_a_page_shows_well_and_asks_nobody_else(source, way, site, browser):
    """Both schemes, both widths. When served, axe also checks contrast, names, landmarks and keyboard access."""
    with visiting(browser, site, reduced_motion="reduce") as visitor:
        visitor.page.goto(site.url(source))
        found = looked_over(visitor.page, with_axe=way == "http") + visitor.complaints
    assert not found, f"{source}:\n" + "\n".join(found)


def sent(folder, urls) -> float:
    """Return how many KB a server that compresses text, as GitHub Pages does, sends for these addresses."""
    paths = {folder / urlsplit(url).path.lstrip("/") for url in urls}
    files = [path / "index.html" if path.is_dir() else path for path in paths]
    data = [(path.suffix, path.read_bytes()) for path in files if path.is_file()]
    return sum(len(gzip.compress(one)) if suffix in COMPRESSED else len(one) for suffix, one in data) / 1000


@pytest.mark.parametrize("source", [source for source in SOURCES if re.match(r"l\d+_", source)])
def test_a_lesson_is_light(source, site_http, browser):
    with visiting(browser, site_http) as visitor:
        asked: list[str] = []
        visitor.page.on("request", lambda request: asked.append(request.url))
        visitor.page.goto(site_http.url(source), wait_until="networkidle")
        assert 50 < sent(site_http.folder, asked) <= MOST_KB, "KB that a first visit takes"


def test_formulas_are_text_without_a_script_and_typeset_with_one(site_http, browser):
    source = "l0_the_loop/README.md"
    assert as_text(r"X \gets X + O W_O") == "X ← X + O W<sub>O</sub>"
    with visiting(browser, site_http, java_script_enabled=False) as visitor:
        visitor.page.goto(site_http.url(source))
        shown = visitor.page.locator(".arithmatex").all_inner_texts()
        assert shown and not [text for text in shown if re.search(r"[\\{}^_]", text)]
    with visiting(browser, site_http) as visitor:
        visitor.page.goto(site_http.url(source))
        visitor.page.locator(".arithmatex").first.scroll_into_view_if_needed()
        visitor.page.locator(".katex").first.wait_for()
        assert visitor.page.locator(".katex").count() == len(shown) and not visitor.page.locator(".katex-error").count()
