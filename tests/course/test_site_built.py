"""Course machinery. The built website without a browser: links, drawings, the menu, what comes from npm.

Protects readers from a link that leads nowhere, and everyone from a library that was changed by hand.
"""

import functools
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

from scripts import ROOT

from lessons._course.catalog import read_lessons
from lessons._course.places import Places
from tests.course.looks import REPOSITORY, each_way
from tests.course.test_words import TERMS

LESSONS = read_lessons(Places.find())
INLINED = re.compile(
    r'<svg[^>]* class="drawing drawing-([\w-]+)[^"]*"[^>]*>\s*<style>(.*?)</style>(.*?)</svg>', re.DOTALL
)
DRAWN = re.compile(r"""url\(["']?#([^)"']+)""")


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


@functools.cache
def stills(file: Path) -> set[str]:
    """Return the names that a picture gives to its parts."""
    return set(re.findall(r'\bid="([^"]+)"', file.read_text(encoding="utf-8"))) if file.is_file() else set()


@each_way
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
        if any("/course.css" in link for link in page.fetched):  # no embedded player
            assert f"{REPOSITORY}/discussions" in page.targets, f"{base} has no place to ask"
        for link in page.targets + page.fetched:
            if re.match(r"[a-z][a-z0-9+.-]*:", link):
                continue
            file, anchor = built(folder, link, base)
            known = pages[file].anchors if file in pages else stills(file) if file.suffix == ".svg" else ()
            on_disk = way == "file" and link.partition("#")[0].endswith("/")  # a disk shows a list of files there
            if on_disk or not file.is_file() or (anchor and anchor not in known and not anchor.startswith("__")):
                dead.append(f"{base}: {link}")
    assert not dead, "these lead nowhere:\n" + "\n".join(dead)


def test_the_menu_has_each_lesson_by_its_title():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for lesson in LESSONS:
        assert f"- {lesson.number}. {lesson.title}: {lesson.id}/README.md\n" in menu, f"mkdocs.yml: {lesson.id}"


def test_a_wrong_address_leads_on(site_folders):
    html = (site_folders["http"] / "404.html").read_text(encoding="utf-8")
    assert not [lesson.id for lesson in LESSONS if f"{lesson.id}/" not in html]


def test_every_arrowhead_and_pattern_that_a_page_refers_to_is_on_it(site_folders):
    """A drawing's rules leave its SVG when it becomes part of a page; the ids that they name must follow."""
    dead = []
    for path in sorted(site_folders["http"].rglob("*.html")):
        html = path.read_text(encoding="utf-8")
        ids = set(re.findall(r'\bid="([^"]+)"', html))
        dead += [f"{path.parent.name}: url(#{name})" for name in DRAWN.findall(html) if name not in ids]
    assert not dead, dead


def test_a_drawing_s_rules_find_the_classes_that_they_ask_for(site_folders):
    """A rule for `.kv-art .free` needs an element of the first class above one of the second, or shapes stay black."""
    for path in sorted(site_folders["http"].rglob("index.html")):
        for name, rules, shapes in INLINED.findall(path.read_text(encoding="utf-8")):
            used = {word for words in re.findall(r'class="([^"]*)"', shapes) for word in words.split()}
            for selectors in re.findall(r"([^{}]+)\{", rules):
                parts = selectors.split(",")[0].partition(f".drawing-{name} ")[2].split()
                *above, last = [set(re.findall(r"\.([\w-]+)", part)) for part in parts or [""]]
                if last and last <= used:
                    assert not set().union(*above) - used, f"{path.parent.name}, {name}: {selectors.strip()!r}"


def test_what_comes_from_npm_is_as_it_came():
    """site/vendored.json has the hash of each file."""
    known = json.loads((ROOT / "site" / "vendored.json").read_text(encoding="utf-8"))
    folders = (ROOT / "site" / "theme" / "assets" / "vendor", ROOT / "tests" / "course" / "vendor")
    there = {
        path.relative_to(ROOT).as_posix(): path for folder in folders for path in folder.rglob("*") if path.is_file()
    }
    assert set(there) == set(known), "run python -m scripts.website.vendor"
    for name, path in there.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == known[name]["sha256"], f"{name} was changed by hand"
    licensed = {Path(name).parts[:-1] for name in known if "LICENSE" in name}
    assert len(licensed) == len({entry["package"] for entry in known.values()}), "a package has no licence here"


def test_the_index_has_no_flattened_tables(site_folders):
    index = json.loads((site_folders["http"] / "search" / "search_index.json").read_text(encoding="utf-8"))
    texts = {entry["location"]: entry["text"] for entry in index["docs"]}
    for location, text in texts.items():
        assert not re.search("<t[dhr]|[─-╿]|language-text", text), location
    glossary = " ".join("".join(text for place, text in texts.items() if place.startswith("glossary/")).split())
    plain = [term.names[-1] for term in TERMS if "`" not in term.names[-1]]
    missing = [name for name in plain if f"{name}: " not in glossary]
    assert not missing, f"a term and its meaning are one sentence of the index, not two cells: {missing}"
