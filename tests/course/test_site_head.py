"""Course machinery. What a built page says about itself, and what its drawings refer to.

Protects what a reader misses without looking for it: an arrow's head, a page's date and author.
"""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

from scripts.website import updated
from scripts.website.browser import Site, visiting
from scripts.website.formulas import as_text

from lessons._course.catalog import read_lessons
from lessons._course.places import Places
from tests.course.looks import SOURCES

DRAWN = re.compile(r"""url\(["']?#([^)"']+)""")


def test_every_arrowhead_and_pattern_that_a_page_refers_to_is_on_it(site_folders):
    """A drawing's rules leave its SVG when it becomes part of a page; the ids that they name must follow."""
    dead = []
    for path in sorted(site_folders["http"].rglob("*.html")):
        html = path.read_text(encoding="utf-8")
        ids = set(re.findall(r'\bid="([^"]+)"', html))
        dead += [f"{path.parent.name}: url(#{name})" for name in DRAWN.findall(html) if name not in ids]
    assert not dead, dead


def test_the_sitemap_has_each_page_s_last_commit(site_folders):
    dates = updated.dates()
    sitemap = (site_folders["http"] / "sitemap.xml").read_text(encoding="utf-8")
    told = dict(re.findall(r"<loc>https://kv-course.github.io/kv-course/(.*?)</loc>\s*(?:<lastmod>(.*?)<)?", sitemap))
    assert told
    for place, date in told.items():
        source = f"lessons/{place}README.md"
        page = source if source in dates else f"lessons/{place.rstrip('/')}.md"
        assert page not in dates or date == dates[page], place


def test_a_page_says_who_wrote_it_when_it_changed_and_where_to_report(site_folders):
    for path in sorted(site_folders["http"].rglob("index.html")):
        html = path.read_text(encoding="utf-8")
        if 'http-equiv="refresh"' in html or "kv-embedded" in html:
            continue
        assert '<meta name="author"' in html and "/issues/new?title=" in html and "CHANGELOG.md" in html, path
        (data,) = re.findall(r'<script type="application/ld\+json">(.*?)</script>', html, re.DOTALL)
        thing = json.loads(data)
        assert thing["@context"] == "https://schema.org" and thing["name"] and thing["url"].startswith("https://"), path


def test_formulas_are_text_without_a_script_and_typeset_with_one(site_http, browser):
    source = "l0_the_loop/README.md"
    assert as_text(r"X \gets X + O W_O") == "X ← X + O W<sub>O</sub>"
    with visiting(browser, site_http, java_script_enabled=False) as visitor:
        visitor.page.goto(site_http.url(source))
        shown = visitor.page.locator(".arithmatex").all_inner_texts()
        assert shown and not [text for text in shown if re.search(r"[\\{}^_]", text)]
    with visiting(browser, site_http) as visitor:
        visitor.page.goto(site_http.url(source))
        visitor.page.locator(".katex").first.wait_for()
        assert visitor.page.locator(".katex").count() == len(shown) and not visitor.page.locator(".katex-error").count()


# What others show of a link


class Head(HTMLParser):
    """The title and the descriptions of one built page."""

    def __init__(self, path: Path):
        super().__init__()
        self.meta: dict[str, str] = {}
        self.title = ""
        self.in_title = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.in_title = tag == "title" and not self.title
        if tag == "meta" and "content" in given:
            self.meta[given.get("property") or given.get("name", "")] = given["content"]

    def handle_data(self, data: str) -> None:
        if self.in_title:
            self.title += data
            self.in_title = False


def test_a_link_to_a_page_says_what_it_is(site_folders):
    site = Site(site_folders["http"], "https://kv-course.github.io/kv-course/", is_file=False)
    heads = {source: Head(site.path(source)) for source in SOURCES}
    for source, head in heads.items():
        meta = head.meta
        assert head.title.strip(), f"{source} has no title"
        assert 40 <= len(meta["description"]) <= 200, f"{source} needs a description in mkdocs.yml, extra, pages"
        assert meta["description"] == meta["og:description"] == meta["twitter:description"]
        assert meta["og:url"] == site.url(source) and meta["twitter:card"] == "summary_large_image"
        picture = site.folder / meta["og:image"].removeprefix(site.base)
        assert meta["og:image"].startswith(site.base) and png_size(picture) == (1200, 630), f"{source}: {picture}"
        assert picture.stat().st_size < 60_000
    for name in ("title", "description"):
        said = [head.title if name == "title" else head.meta[name] for head in heads.values()]
        assert len(set(said)) == len(said), f"two pages have the same {name}"
    for lesson in read_lessons(Places.find()):
        assert heads[f"{lesson.id}/README.md"].meta["description"] == lesson.summary, f"mkdocs.yml: {lesson.id}"


def png_size(path: Path) -> tuple[int, ...]:
    """Return width and height, in pixels, from a PNG's first bytes."""
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")
