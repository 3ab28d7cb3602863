"""Course machinery. The built website without a browser: links, tables, pictures, the menu, what comes from npm.

Protects readers from a link that leads nowhere, and everyone from a library that was changed by hand.
"""

import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

from scripts import ROOT

from lessons._course.catalog import read_lessons
from lessons._course.places import Places
from tests.course.looks import SOURCES, each_way
from tests.course.test_words import TERMS


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


def test_tables_of_words_are_labelled_and_tables_of_figures_are_not(site_folders):
    for lesson in read_lessons(Places.find()):
        html = (site_folders["http"] / lesson.id / "index.html").read_text(encoding="utf-8")
        labels = set(re.findall(r'<td[^>]* data-label="(.*?)"', html))
        assert {"pitfall", "symptom", "cause", "test", "task", "where", "checked by"} <= labels, lesson.id
        assert not any("wzxhzdk" in label for label in labels), f"{lesson.id}: Markdown's own mark in {labels}"
        assert re.search(r"<td[^>]*><code>test_<wbr>", html), f"{lesson.id}: a long name in a cell may break"
    ladder = (site_folders["http"] / "ladder" / "index.html").read_text(encoding="utf-8")
    assert "data-label" not in ladder, "figures are compared down a column"


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


def test_the_index_has_no_flattened_tables(site_folders):
    index = json.loads((site_folders["http"] / "search" / "search_index.json").read_text(encoding="utf-8"))
    texts = {entry["location"]: entry["text"] for entry in index["docs"]}
    for location, text in texts.items():
        assert not re.search("<t[dhr]|[─-╿]|language-text", text), location
    glossary = " ".join("".join(text for place, text in texts.items() if place.startswith("glossary/")).split())
    plain = [term.names[-1] for term in TERMS if "`" not in term.names[-1]]
    missing = [name for name in plain if f"{name}: " not in glossary]
    assert not missing, f"a term and its meaning are one sentence of the index, not two cells: {missing}"
