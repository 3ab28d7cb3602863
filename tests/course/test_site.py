"""Course machinery. The website as readers see it: each page, light and dark, wide and narrow, served and from disk.

Protects readers on a phone, in the dark, with a screen reader, without a network: a page must be whole for each of
them. No test depends on how fast a browser shows a page. All of it is nightly; test_visits.py visits each page once.
"""

import re

from scripts.website.browser import visiting
from scripts.website.formulas import as_text

import pytest

from tests.course.looks import SOURCES, each_way, looked_over

each_page = pytest.mark.parametrize("source", SOURCES)


@each_page
@each_way
def test_a_page_shows_well_and_asks_nobody_else(source, way, site, browser):
    """Both schemes, both widths. When served, axe also checks contrast, names, landmarks and keyboard access."""
    with visiting(browser, site, reduced_motion="reduce") as visitor:
        visitor.page.goto(site.url(source))
        found = looked_over(visitor.page, with_axe=way == "http") + visitor.complaints
    assert not found, f"{source}:\n" + "\n".join(found)


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
