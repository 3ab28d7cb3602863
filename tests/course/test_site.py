"""Course machinery. The website as readers see it: each page, light and dark, wide and narrow, served and from disk.

Protects readers on a phone, in the dark, with a screen reader, without a network: a page must be whole for each of
them. No test depends on how fast a browser shows a page. All of it is nightly; test_visits.py visits each page once.
"""

import json
import re
from pathlib import Path

from scripts import ROOT
from scripts.bench import plot
from scripts.website.browser import PHONE, Site, build_sites, visiting

import pytest

from lessons._course.catalog import read_lessons
from lessons._course.places import Places
from tests.course.looks import SCHEMES, SOURCES, STICKS_OUT, each_way, looked_over

HOME_LIMIT = 700_000  # bytes, with fonts, before a click
FONTS = (".woff2", ".woff", ".ttf")
each_page = pytest.mark.parametrize("source", SOURCES)


@each_page
@each_way
def test_a_page_shows_well_and_asks_nobody_else(source, way, site, browser):
    """Both schemes, both widths. When served, axe also checks contrast, names, landmarks and keyboard access."""
    with visiting(browser, site, reduced_motion="reduce") as visitor:
        visitor.page.goto(site.url(source))
        found = looked_over(visitor.page, with_axe=way == "http") + visitor.complaints
    assert not found, f"{source}:\n" + "\n".join(found)


def test_a_phone_shows_a_chart_with_words_that_can_be_read(site_http, browser):
    """The picture scrolls, the page does not."""
    with visiting(browser, site_http, width=PHONE) as visitor:
        visitor.page.goto(site_http.url("l13_machines/README.md"))
        chart = visitor.page.locator(".drawing-routing")
        sizes = chart.locator("text").evaluate_all("texts => texts.map(text => text.getBoundingClientRect().height)")
        assert min(sizes) > 10
        assert not visitor.page.evaluate(STICKS_OUT)


def test_every_chart_has_the_pages_font_and_colours(site_http, browser):
    """One family of pictures: no chart stays an image with letters as shapes, in a font that the page does not use."""
    charts = [
        path for path in (ROOT / "lessons").rglob("*.svg") if re.search(r'<svg[^>]* width="[\d.]+pt"', read(path))
    ]
    assert len(charts) > 5
    for path in charts:
        assert "<text" in read(path) and "DejaVu" not in read(path), f"{path}: draw it again with scripts/bench/plot.py"
        used = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", re.sub("<style>.*?</style>", "", read(path))))
        assert used <= set(plot.DARK), f"{path}: {used - set(plot.DARK)} have no colour in the dark"
    with visiting(browser, site_http, scheme="dark") as visitor:
        visitor.page.goto(site_http.url("l17_bits/README.md"))
        words = visitor.page.locator(".drawing-methods text").first
        assert "Plex Sans" in words.evaluate("node => getComputedStyle(node).fontFamily")
        assert words.evaluate("node => getComputedStyle(node).fill") == "rgb(158, 171, 189)", "--kv-muted, in the dark"


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


CARDS = """() => [...document.querySelectorAll("td[data-label]:not(:first-child)")].map(cell =>
    [cell.dataset.label, getComputedStyle(cell, "::before").content, cell.scrollWidth <= cell.clientWidth])"""


@pytest.mark.parametrize("scripts", [True, False])
def test_a_phone_shows_each_pitfall_as_a_card_with_labelled_lines(scripts, site_http, browser):
    with visiting(browser, site_http, width=PHONE, java_script_enabled=scripts) as visitor:
        visitor.page.goto(site_http.url("l5_scheduler/README.md"))
        visitor.page.evaluate("document.querySelectorAll('details').forEach(box => (box.open = true))")
        table = visitor.page.locator("#pitfalls + p + details table, #pitfalls + details table").first
        box, cell = table.bounding_box(), table.locator("tbody td").nth(2).bounding_box()
        assert box["width"] <= PHONE and cell["width"] > 0.8 * box["width"], "a card's line takes the whole width"
        if scripts:
            shown = visitor.page.evaluate(CARDS)
            assert all(content == f'"{label}"' and fits for label, content, fits in shown), shown
            assert {"symptom", "cause", "test"} <= {label for label, _, _ in shown}
            assert not visitor.page.evaluate(STICKS_OUT)


def test_paper_shows_answers(site_http, browser):
    with visiting(browser, site_http) as visitor:
        visitor.page.goto(site_http.url("l4_sampler/README.md"))
        answer = visitor.page.locator(".md-content details p").first
        assert not answer.is_visible()
        visitor.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert answer.is_visible()
        visitor.page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert not answer.is_visible()


def test_the_map_of_the_pieces_has_links_and_the_pages_font(site_http, browser):
    with visiting(browser, site_http, width=PHONE) as visitor:
        visitor.page.goto(site_http.url("how-the-pieces-fit.md"))
        box = visitor.page.locator(".drawing a", has_text="scheduler").first
        assert box.get_attribute("href").endswith("/mini_engine/engine/scheduler.py")
        words = box.locator("text").last
        assert "Plex Sans" in words.evaluate("node => getComputedStyle(node).fontFamily")
        assert words.bounding_box()["height"] > 11, "a phone must show words that can be read"


def test_the_palette_button_changes_the_pictures_too(site_http, browser):
    with visiting(browser, site_http, scheme="light") as visitor:
        visitor.page.goto(site_http.url("l0_the_loop/README.md"))
        picture = visitor.page.locator(".md-content .drawing").first
        light = picture.screenshot()
        for _ in range(2):  # the system's colours, light, dark
            visitor.page.locator("label[for^=__palette]:visible").click()
        assert visitor.page.evaluate("document.body.dataset.mdColorScheme") == "slate"
        visitor.page.wait_for_timeout(300)
        assert picture.screenshot() != light, "the picture must not keep its light colours on a dark page"


def test_the_home_page_is_light(site_http, browser):
    sent: dict[str, int] = {}
    with visiting(browser, site_http) as visitor:
        visitor.page.on("response", lambda reply: sent.update({reply.url: len(reply.body())}))
        visitor.page.goto(site_http.url(), wait_until="networkidle")
    heaviest = sorted(sent.items(), key=lambda item: -item[1])[:6]
    assert any(url.endswith(FONTS) for url in sent), "the fonts count"
    assert sum(sent.values()) < HOME_LIMIT, f"{sum(sent.values())} bytes; the heaviest: {heaviest}"


SLOW_LINE = 1_600_000 / 8  # bytes a second
ROUND_TRIPS = 3 * 0.15  # seconds: connecting, the page, and what it names
LARGEST_PAINT = 2.5  # seconds
LARGEST = """() => new Promise(done => new PerformanceObserver(list =>
    done(list.getEntries().at(-1).element.className)).observe({type: "largest-contentful-paint", buffered: true}))"""


def test_the_front_page_is_painted_in_time_on_a_slow_line(site_http, browser):
    """Counted, not timed: the bytes of all that its head names, uncompressed, and what is painted once they came."""
    sent: dict[str, int] = {}
    with visiting(browser, site_http, width=PHONE) as visitor:
        visitor.page.on("response", lambda reply: sent.update({reply.url: len(reply.body())}))
        visitor.page.goto(site_http.url(), wait_until="networkidle")
        largest = visitor.page.evaluate(LARGEST)
        named = visitor.page.evaluate(
            "[location.href, ...[...document.head.querySelectorAll('link[rel=stylesheet], script[src]')]"
            ".map(node => node.href || node.src)]"
        )
    assert largest == "kv-hero__promise", "words, which wait for no picture and no script"
    assert len(named) > 8
    seconds = sum(sent[url] for url in named) / SLOW_LINE + ROUND_TRIPS
    assert seconds <= LARGEST_PAINT, f"{seconds:.2f} s at 1.6 Mbit/s"


def test_a_formula_and_a_diagram_are_drawn_without_another_host(tmp_path, browser):
    """No page needs one, but a page that gets one must find everything it needs in the site."""
    docs, theme = tmp_path / "lessons", ROOT / "site" / "theme"
    docs.mkdir()
    (docs / "README.md").write_text("# Home\n", encoding="utf-8")
    (docs / "two.md").write_text("# Two\n\n$x_1$\n\n```mermaid\ngraph LR\n  A --> B\n```\n", encoding="utf-8")
    settings = {"INHERIT": str(ROOT / "mkdocs.yml"), "theme": {"custom_dir": str(theme)}, "watch": [], "nav": None}
    (tmp_path / "mkdocs.yml").write_text(json.dumps(settings), encoding="utf-8")
    build_sites({"file": tmp_path / "site"}, config=tmp_path / "mkdocs.yml")
    site = Site.on_disk(tmp_path / "site")
    with visiting(browser, site) as visitor:
        visitor.page.goto(site.url("two.md"))
        visitor.page.wait_for_selector(".katex")
        visitor.page.wait_for_selector("div.mermaid")  # the theme puts the drawing in place of the text
        assert not visitor.complaints


BACKGROUND = """() => "#" + getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).slice(0, 3)
    .map(part => Number(part).toString(16).padStart(2, "0")).join("")"""


def test_the_browsers_own_colour_is_the_pages(site_http, browser):
    for scheme in SCHEMES:
        with visiting(browser, site_http, scheme=scheme) as visitor:
            visitor.page.goto(site_http.url())
            meta = visitor.page.locator("meta[name=theme-color]")
            meta.wait_for(state="attached")
            assert meta.get_attribute("content") == visitor.page.evaluate(BACKGROUND), scheme


def test_a_wrong_address_leads_on(site_http, browser):
    html = (site_http.folder / "404.html").read_text(encoding="utf-8")
    for lesson in read_lessons(Places.find()):
        assert f"{lesson.id}/" in html
