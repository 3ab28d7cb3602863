"""Course machinery. A Markdown extension for the website: a picture that links to a recorded trace becomes a player.

A page says `[![what it shows](pool.svg)](pool.trace.js)`. On GitHub that is a picture linked to its data; here the link
gets the class that player.js looks for, and the addresses of the functions that made the trace's frames, at their
current lines. Text between `<!-- on GitHub -->` and `<!-- end -->` is only for readers on GitHub, for example to say
where the picture plays; the website leaves it out.
"""

import json
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement

from scripts import ROOT
from scripts.pages.sync_code import SyncError, lines_of, symbol_node
from scripts.traces.tape import read_trace
from scripts.website.repo_links import DOCS, RepoLinks, page_path

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor
from markdown.treeprocessors import Treeprocessor

BEFORE_MKDOCS = 1  # mkdocs rewrites links with priority 0
BEFORE_HTML = 30  # Markdown extracts raw HTML, including comments, with priority 20
WITHOUT_SCRIPTS = (
    "With JavaScript this picture is a player: it shows every step, each with a sentence. Here is one of them."
)
log = logging.getLogger("mkdocs.player_links")
GITHUB_ONLY = re.compile(r"<!-- on GitHub -->.*?<!-- end --> ?", re.DOTALL)


class GitHubOnly(Preprocessor):
    """Removes the text meant only for readers on GitHub."""

    def run(self, lines: list[str]) -> list[str]:
        return GITHUB_ONLY.sub("", "\n".join(lines)).split("\n")


class PlayerLinks(Treeprocessor):
    """Marks the links of one page."""

    def run(self, root: Element) -> None:
        page = page_path(self.md)
        for link in root.iter("a"):
            if link.get("href", "").endswith(".trace.js"):
                link.set("class", f"{link.get('class', '')} kv-player".strip())
                if page is not None:
                    path = (ROOT / DOCS / page).parent / link.get("href", "")
                    names = codes(path) if path.is_file() else ()
                    link.set("data-code", json.dumps(addresses(self.md, page, path.name, names)))
                picture = link.find("img")
                if picture is not None:  # without JavaScript, a click shows the picture, not the trace's source
                    link.set("data-file", Path(link.get("href", "")).name)
                    link.set("href", picture.get("src", ""))
                    without = SubElement(link, "noscript")
                    without.text = WITHOUT_SCRIPTS


def addresses(md: Markdown, page: str, shown: str, names: Iterable[str]) -> dict[str, str]:
    """Return the repository address of each function that made a frame. Warn if one does not exist.

    Args:
        shown: the frames' owner, for the warning: a trace's file, or a lab.
        names: of the functions, as frames name them (Tape.frame).
    """
    found = {}
    for code in names:
        try:
            found[code] = address(md, page, code)
        except SyncError as error:
            log.warning("Doc file '%s' shows '%s', which names '%s': %s.", page, shown, code, error)
    return found


def address(md: Markdown, page: str, code: str) -> str:
    file, first, last = place_of(code)
    link = f"{'../' * (page.count('/') + 1)}{file}#L{first}-L{last}"
    repo_links = md.treeprocessors["repo_links"]
    assert isinstance(repo_links, RepoLinks)
    return repo_links.address(file, link, page, is_picture=False)


def codes(path: Path) -> list[str]:
    """Return the functions that a trace's frames name, each once."""
    frames = read_trace(path.read_text(encoding="utf-8"))["frames"]
    return list(dict.fromkeys(frame["code"] for frame in frames if "code" in frame))


def place_of(code: str) -> tuple[str, int, int]:
    """Return the file of a function such as `mini_engine/kv/radix.py::RadixTree.match`, its first and its last line.

    Raises:
        SyncError: the file or the function does not exist.
    """
    file, _, symbol = code.partition("::")
    path = ROOT / file
    if not path.is_file():
        raise SyncError(f"there is no file {file}")
    return file, *lines_of(symbol_node(path.read_text(encoding="utf-8"), symbol))


class PlayerLinksExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(GitHubOnly(md), "github_only", BEFORE_HTML)
        md.treeprocessors.register(PlayerLinks(md), "player_links", BEFORE_MKDOCS)


def makeExtension(**settings) -> PlayerLinksExtension:
    return PlayerLinksExtension(**settings)
