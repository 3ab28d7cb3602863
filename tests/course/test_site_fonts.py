"""Course machinery. Fonts that come late: no line of a page moves when they arrive.

Protects readers on a slow line from losing their place in the first second.
"""

import time

from scripts.website.browser import PHONE, QuietHandler, visiting

import pytest

LATE = 0.25  # seconds
MOST_SHIFT = 0.05  # of layout, as browsers count it; measured: 0.001
WATCH = """window.shift = 0; new PerformanceObserver(list => list.getEntries().forEach(entry => {
    if (!entry.hadRecentInput) window.shift += entry.value; })).observe({type: "layout-shift", buffered: true});"""
PAGES = ("README.md", "l3_block_tensor/README.md", "l13_machines/README.md", "l14_speculation/README.md")


@pytest.fixture
def late_fonts(monkeypatch):
    at_once = QuietHandler.do_GET

    def do_get(self) -> None:
        time.sleep(LATE if self.path.endswith(".woff2") else 0)
        at_once(self)

    monkeypatch.setattr(QuietHandler, "do_GET", do_get)


@pytest.mark.parametrize("width", [1440, PHONE])
@pytest.mark.parametrize("source", PAGES)
def test_no_line_moves_when_the_fonts_arrive(source, width, late_fonts, site_http, browser):
    with visiting(browser, site_http, width=width) as visitor:
        visitor.page.add_init_script(WATCH)
        visitor.page.goto(site_http.url(source), wait_until="networkidle")
        visitor.page.evaluate("() => document.fonts.ready")
        visitor.page.wait_for_timeout(100)
        assert visitor.page.evaluate("shift") < MOST_SHIFT
