"""Course machinery. The website as readers see it: each page, light and dark, wide and narrow, served and from disk.

Protects readers on a phone, in the dark, with a screen reader, without a network: a page must be whole for each of
them, and every link must lead somewhere. No test depends on how fast a browser shows a page; scripts.website.report
measures that.
"""

import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

from scripts import ROOT
from scripts.bench import plot
from scripts.website import cards
from scripts.website.browser import DESKTOP, PHONE, Site, build_sites, visiting

import pytest

from lessons._course.catalog import read_lessons
from lessons._course.places import Places
from tests.course.test_words import TERMS

SOURCES = sorted(path.relative_to(ROOT / "lessons").as_posix() for path in (ROOT / "lessons").rglob("*.md"))
AXE = ROOT / "tests" / "course" / "vendor" / "axe" / "axe.min.js"
HOME_LIMIT = 700_000  # bytes, with fonts, before a click
SCHEMES = {"light": "default", "dark": "slate"}  # as the theme names them
ALL_RULES, CONTRAST = {}, {"runOnly": ["color-contrast"]}  # what axe looks at
LOOKS = [("light", DESKTOP, ALL_RULES), ("light", PHONE, None), ("dark", PHONE, ALL_RULES), ("dark", DESKTOP, CONTRAST)]
EVERY_LOOK = [(scheme, width, ALL_RULES) for scheme in SCHEMES for width in (DESKTOP, PHONE)]
FONTS = (".woff2", ".woff", ".ttf")
each_page = pytest.mark.parametrize("source", SOURCES)
each_way = pytest.mark.parametrize("way", ["http", "file"])

STICKS_OUT = """() => [...document.querySelectorAll("body, .kv-hero *, .md-content *, .md-footer *")].filter(part => {
    const box = part.getBoundingClientRect();
    if (part === document.body) return document.documentElement.scrollWidth > innerWidth;
    if (!box.width || box.right <= innerWidth + 1) return false;
    for (let up = part.parentElement; up; up = up.parentElement)
        if (getComputedStyle(up).overflowX !== "visible" && up.getBoundingClientRect().right <= innerWidth + 1)
            return false;
    return true;
}).slice(0, 3).map(part => "wider than the window: " + part.outerHTML.slice(0, 120))"""

RUN_AXE = """async ({place, ...rules}) => (
    await axe.run(place ?? document, {resultTypes: ["violations"], ...rules})).violations.flatMap(
    found => found.nodes.slice(0, 3).map(node => `${found.id}: ${found.help}: ${node.html.slice(0, 160)} ${
        [...node.any, ...node.all, ...node.none].map(check => check.message).join("; ").slice(0, 300)}`))"""

TWO_FRAMES = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def looked_over(page, looks=LOOKS, with_axe: bool = True) -> list[str]:
    """Return what sticks out of an open page, and what axe says of it, in each (scheme, width, axe's rules)."""
    found = []
    if with_axe:
        page.evaluate(AXE.read_text(encoding="utf-8"))
    for scheme, width, rules in looks:
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.set_viewport_size({"width": width, "height": 844})
        page.wait_for_function("name => document.body.dataset.mdColorScheme === name", arg=SCHEMES[scheme])
        page.evaluate(TWO_FRAMES)
        said = page.evaluate(STICKS_OUT)
        if with_axe and rules is not None:
            said += page.evaluate(RUN_AXE, rules)
        found += [f"{scheme}, {width} pixels wide: {text}" for text in said]
    return found


@pytest.fixture
def site(way: str, request: pytest.FixtureRequest) -> Site:
    return request.getfixturevalue(f"site_{way}")


@each_page
@each_way
def test_a_page_shows_well_and_asks_nobody_else(source, way, site, browser):
    """Both schemes, both widths. When served, axe also checks contrast, names, landmarks and keyboard access."""
    with visiting(browser, site, reduced_motion="reduce") as visitor:
        visitor.page.goto(site.url(source))
        found = looked_over(visitor.page, with_axe=way == "http") + visitor.complaints
    assert not found, f"{source}:\n" + "\n".join(found)


CUT = """() => [...document.querySelectorAll(".md-content pre > code")]
    .filter(code => code.scrollWidth > code.clientWidth + 1)
    .map(code => `${code.scrollWidth - code.clientWidth} pixels are cut: ${code.textContent.trim().slice(0, 60)}`)"""


@each_page
def test_on_a_laptop_no_code_is_cut(source, site_http, browser):
    with visiting(browser, site_http, width=1440) as visitor:
        visitor.page.goto(site_http.url(source))
        assert not visitor.page.evaluate(CUT)


def test_drawings_in_text_fit_a_laptop():
    """Lines of a drawing that went on below would destroy it; 99 characters fit."""
    for source in SOURCES:
        for block in re.findall(
            r"```text\n(.*?)```", (ROOT / "lessons" / source).read_text(encoding="utf-8"), re.DOTALL
        ):
            if re.search("[─-╿]", block):
                wide = max(block.split("\n"), key=len)
                assert len(wide) <= 99, f"{source}: {len(wide)} characters: {wide}"


def test_tables_and_dialogs_need_no_repair_by_a_script(site_folders):
    """An empty corner is no heading, and the search box has its name before any script runs."""
    for path in sorted(site_folders["http"].rglob("*.html")):
        html = path.read_text(encoding="utf-8")
        assert not re.search(r"<th[^>]*>\s*</th>", html), path
        assert len(re.findall(r'role="dialog"', html)) == len(re.findall(r'role="dialog" aria-label=', html)), path


def test_pictures_say_their_size(site_folders):
    """Otherwise the text below a picture moves when it arrives. The strip's picture has its height from the styles."""
    for path in sorted(site_folders["http"].rglob("*.html")):
        for image in re.findall(r"<img[^>]*>", path.read_text(encoding="utf-8")):
            if 'alt=""' not in image:
                assert re.search(r' width="\d+"', image) and re.search(r' height="\d+"', image), f"{path}: {image}"


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


CUT_TABLES = """() => [...document.querySelectorAll(".md-content table")].filter(table => {
    const room = table.closest(".md-typeset__scrollwrap");
    if (!table.getClientRects().length) return false;
    if (!room || room.scrollWidth <= room.clientWidth + 1) return table.getBoundingClientRect().right > innerWidth;
    room.scrollLeft = room.scrollWidth;
    const name = table.querySelector("tbody tr > :first-child").getBoundingClientRect();
    const says = getComputedStyle(room, "::after").content.includes("sideways");
    const seen = name.left >= 0 && name.right < innerWidth - 60;
    room.scrollLeft = 0;
    return !(says && seen && room.tabIndex === 0);
}).map(table => table.innerText.slice(0, 60))"""


@each_page
def test_on_a_phone_no_table_is_cut_without_a_word(source, site_http, browser):
    """A table fits, or says that it scrolls and keeps the names of its rows in sight, for keyboards too."""
    with visiting(browser, site_http, width=PHONE) as visitor:
        visitor.page.goto(site_http.url(source))
        visitor.page.evaluate("document.querySelectorAll('details').forEach(box => (box.open = true))")
        visitor.page.wait_for_timeout(100)  # a box that has been opened is measured by course.js
        assert not visitor.page.evaluate(CUT_TABLES), source


@pytest.mark.parametrize("lesson", [f"{one.id}/README.md" for one in read_lessons(Places.find())])
def test_a_lesson_breathes(lesson, site_http, browser):
    """At most 12,000 pixels on a laptop, lines of 70 to 75 characters, and something that moves under the title."""
    with visiting(browser, site_http, width=1440, reduced_motion="reduce") as visitor:
        page = visitor.page
        page.goto(site_http.url(lesson), wait_until="networkidle")
        height = page.evaluate("document.documentElement.scrollHeight")
        assert height <= 12_000, f"{lesson} is {height} pixels high: fold what is looked up"
        assert 65 <= page.evaluate(LINES) <= 78
        first = page.locator(".kv-strip + p + *, h1 + p + *").first
        assert first.locator("figure.kv-figure").count() or "kv-" in first.get_attribute("class"), "a player or a tool"


LINES = """() => { // characters a line: a paragraph's last line is half full, on average
    let [characters, lines] = [0, 0];
    for (const text of document.querySelectorAll(".kv-lesson > p:not(:has(figure))")) {
        const height = Math.round(text.getBoundingClientRect().height / parseFloat(getComputedStyle(text).lineHeight));
        if (height > 2) [characters, lines] = [characters + text.innerText.length, lines + height - 0.5];
    }
    return characters / lines;
}"""

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


def test_tables_of_words_are_labelled_and_tables_of_figures_are_not(site_folders):
    for lesson in read_lessons(Places.find()):
        html = (site_folders["http"] / lesson.id / "index.html").read_text(encoding="utf-8")
        labels = set(re.findall(r'<td[^>]* data-label="(.*?)"', html))
        assert {"pitfall", "symptom", "cause", "test", "task", "where", "checked by"} <= labels, lesson.id
        assert not any("wzxhzdk" in label for label in labels), f"{lesson.id}: Markdown's own mark in {labels}"
        assert re.search(r"<td[^>]*><code>test_<wbr>", html), f"{lesson.id}: a long name in a cell may break"
    ladder = (site_folders["http"] / "ladder" / "index.html").read_text(encoding="utf-8")
    assert "data-label" not in ladder, "figures are compared down a column"


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


@each_way
def test_search_finds_a_block_table(way, site, browser):
    with visiting(browser, site) as visitor:
        visitor.page.goto(site.url())
        visitor.page.locator(".md-search__input").click()
        visitor.page.locator(".md-search__input").type("block table")
        results = visitor.page.locator(".md-search-result__item")
        results.first.wait_for()
        assert "block table" in " ".join(results.all_inner_texts()).lower()
        results.first.locator("a").first.click()
        visitor.page.wait_for_selector("h1")
        assert visitor.page.url.startswith(site.base) and visitor.page.url != site.url()
        assert not visitor.complaints


@pytest.mark.parametrize(
    "words, lesson",
    [
        ("preemption", "l5_scheduler"),
        ("chunked prefill", "l5_scheduler"),
        ("radix", "l8_radix"),
        ("copy on write", "l8_radix"),
        ("top-p", "l4_sampler"),
        ("top-k", "l4_sampler"),
    ],
)
def test_search_finds_the_lesson_before_reference(words, lesson, site_http, browser):
    with visiting(browser, site_http) as visitor:
        visitor.page.goto(site_http.url())
        visitor.page.locator(".md-search__input").click()
        visitor.page.locator(".md-search__input").type(words)
        first = visitor.page.locator(f".md-search-result__item:first-child a[href*='/{lesson}/']")
        first.first.wait_for()
        assert not visitor.complaints


def test_the_index_has_no_flattened_tables(site_folders):
    index = json.loads((site_folders["http"] / "search" / "search_index.json").read_text(encoding="utf-8"))
    texts = {entry["location"]: entry["text"] for entry in index["docs"]}
    for location, text in texts.items():
        assert not re.search("<t[dhr]|[─-╿]|language-text", text), location
    assert "What imports what" not in texts["how-the-pieces-fit/"], "a drawing's words are no text"
    glossary = " ".join("".join(text for place, text in texts.items() if place.startswith("glossary/")).split())
    plain = [term.names[-1] for term in TERMS if "`" not in term.names[-1]]
    missing = [name for name in plain if f"{name}: " not in glossary]
    assert not missing, f"a term and its meaning are one sentence of the index, not two cells: {missing}"


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


class Links(HTMLParser):
    """The links, pictures, scripts and anchors of one built page."""

    def __init__(self, path: Path):
        super().__init__()
        self.anchors, self.targets, self.fetched = set(), [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "link" and given.get("rel") in {"canonical", "prev", "next"}:
            return
        for name in ("href", "src"):
            if given.get(name):
                (self.targets if tag == "a" else self.fetched).append(given[name])


def built(folder: Path, link: str, base: str) -> tuple[Path, str]:
    """Return the file in the build that a link on page `base` (a path in the folder) leads to, and the anchor."""
    parts = urlsplit(urljoin("https://site/" + base, link))
    path = folder / unquote(parts.path).lstrip("/")
    return (path / "index.html" if path.is_dir() or parts.path.endswith("/") else path), unquote(parts.fragment)


@pytest.mark.parametrize("way", ["http", "file"])
def test_every_link_and_anchor_leads_somewhere(way, site_folders):
    folder = site_folders[way]
    pages = {path: Links(path) for path in sorted(folder.rglob("*.html"))}
    dead = []
    for path, page in pages.items():
        base = path.relative_to(folder).as_posix()
        if base == "404.html":  # its links are from the site's root, wherever that is
            continue
        outside = [link for link in page.fetched if re.match(r"(https?:)?//", link)]
        assert not outside, f"{base} would fetch {outside}"
        for link in page.targets + page.fetched:
            if re.match(r"[a-z][a-z0-9+.-]*:", link):
                continue
            file, anchor = built(folder, link, base)
            known = pages[file].anchors if file in pages else ()
            if not file.is_file() or (anchor and anchor not in known and not anchor.startswith("__")):
                dead.append(f"{base}: {link}")
    assert not dead, "these lead nowhere:\n" + "\n".join(dead)


# What the site is made of


def test_the_menu_has_each_lesson_by_its_title():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for lesson in read_lessons(Places.find()):
        assert f"- {lesson.number}. {lesson.title}: {lesson.id}/README.md\n" in menu, (
            f"mkdocs.yml: lesson {lesson.number}"
        )


def test_what_comes_from_npm_is_as_it_came():
    """site/vendored.json has the hash of each file; scripts/website/vendor.py --check asks npm itself."""
    known = json.loads((ROOT / "site" / "vendored.json").read_text(encoding="utf-8"))
    folders = (ROOT / "site" / "theme" / "assets" / "vendor", ROOT / "tests" / "course" / "vendor")
    there = {
        path.relative_to(ROOT).as_posix(): path for folder in folders for path in folder.rglob("*") if path.is_file()
    }
    assert set(there) == set(known), "run python -m scripts.website.vendor"
    for name, path in there.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == known[name]["sha256"], f"{name} was changed by hand"
    folders_with_licence = {Path(name).parts[:-1] for name in known if "LICENSE" in name}
    assert len(folders_with_licence) == len({entry["package"] for entry in known.values()}), (
        "a package has no licence here"
    )


def test_the_lock_file_pins_what_is_asked_for_and_names_no_machine():
    asked = json.loads((ROOT / "site" / "package.json").read_text(encoding="utf-8"))["dependencies"]
    locked = json.loads((ROOT / "site" / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    vendored = json.loads((ROOT / "site" / "vendored.json").read_text(encoding="utf-8"))
    assert {name: locked[f"node_modules/{name}"]["version"] for name in asked} == asked
    copied = {package for entry in vendored.values() for package in entry["package"].split(", ")}
    wanted = {f"{name} {version}" for name, version in asked.items()}
    assert wanted - copied == {f"esbuild {asked['esbuild']}"}, "it bundles the editor and is not part of it"
    for name, version in (package.rsplit(" ", 1) for package in copied - wanted):  # what the editor's packages need
        assert locked[f"node_modules/{name}"]["version"] == version
    for package in locked.values():
        assert package.get("resolved", "https://registry.npmjs.org/").startswith("https://registry.npmjs.org/")


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
        assert "LLM inference" in head.title, f"{source}: the title {head.title!r}"
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


def test_cards_show_what_the_lessons_say():
    assert not [card.name for card in cards.old(cards.cards())], "run python -m scripts.website.cards"


def test_icons_are_pictures_of_their_size():
    for name, size in cards.ICONS.items():
        assert png_size(cards.THEME / name) == (size, size)


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
