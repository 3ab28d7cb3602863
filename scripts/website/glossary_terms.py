"""Course machinery. A Markdown extension for the website: links the first use of a glossary term on each page.

The link leads to the glossary and has the term's meaning as its title, which browsers and screen readers present. Terms
are read from the tables of lessons/glossary.md: a row begins with `<a id="…"></a>` and the term, further spellings
after commas. `data-quiet` keeps an everyday word from being linked; `data-not="l6 capstone"` does so on pages where it
means something else. Headings, code, links and table headers are left alone.
"""

import posixpath
import re
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from scripts import ROOT
from scripts.website.repo_links import DOCS, page_path

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from markdown.util import AtomicString

GLOSSARY = "glossary.md"
ROW = re.compile(
    r'^\| <a id="(?P<id>[^"]+)"(?P<quiet> data-quiet)?(?: data-not="(?P<pages>[^"]*)")?></a>'
    r"(?P<names>.*?) \| (?P<meaning>.*?) \|",
    re.MULTILINE,
)
CLOSED = {"a", "code", "pre", "h1", "h2", "h3", "h4", "h5", "h6", "th", "summary", "button", "script", "style"}
BEFORE_LINKS = 2  # after attributes in braces (8) and the table of contents (5), before repo_links (1) and mkdocs (0)


@dataclass(frozen=True)
class Term:
    """One row of the glossary.

    names: its spellings; those in code marks occur only in code, so they are never linked.
    not_on: prefixes of the paths of pages without links to it; "" matches every page.
    """

    id: str
    names: tuple[str, ...]
    meaning: str
    not_on: tuple[str, ...] = ()

    def is_meant_on(self, page: str) -> bool:
        """Return True if a page, such as `l0_the_loop/README.md`, uses the word in this sense."""
        return not page.startswith(self.not_on)


def read_terms(text: str) -> list[Term]:
    """Return every row of the glossary's tables."""
    return [
        Term(row["id"], tuple(row["names"].split(", ")), plain(row["meaning"]), not_on(row))
        for row in ROW.finditer(text)
    ]


def not_on(row: re.Match) -> tuple[str, ...]:
    named = (row["pages"] or "").split()
    return ("",) if row["quiet"] else tuple(page + end for page in named for end in ("_", ".md"))  # l1 is not l10


def plain(markdown: str) -> str:
    """Return the text without its markup, suitable for a title."""
    return re.sub(r"[`*]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown))


class Finder:
    """Finds the terms that a page has not linked yet, in one piece of text after another."""

    def __init__(self, terms: list[Term]) -> None:
        self.terms = {key(name): term for term in terms for name in term.names if not name.startswith("`")}
        longest_first = sorted(self.terms, key=len, reverse=True)
        self.pattern = re.compile(rf"(?<![\w-])({'|'.join(map(pattern_of, longest_first))})s?(?![\w-])")

    def not_meant_on(self, page: str) -> set[str]:
        """Return the ids of the terms that mean something else on this page."""
        return {term.id for term in self.terms.values() if not term.is_meant_on(page)}

    def first(self, text: str, seen: set[str]) -> tuple[int, int, Term] | None:
        """Return start, end and term of the first one in `text` whose id is not in `seen`."""
        for match in self.pattern.finditer(text):
            term = self.terms[key(re.sub(r"\s+", " ", match[1]))]
            if term.id not in seen:
                return match.start(), match.end(), term
        return None


def key(name: str) -> str:
    """Return a name's lookup key: the same with a capital first letter, as at the start of a sentence."""
    return name if has_capitals(name[1:]) else name.lower()


def has_capitals(text: str) -> bool:
    return text.lower() != text


def pattern_of(name: str) -> str:
    """Return a regular expression for a name: a space may be a line break, and a plain word may begin a sentence."""
    first = f"[{name[0]}{name[0].upper()}]" if not has_capitals(name) and name[0].isalpha() else re.escape(name[0])
    return first + r"\s+".join(map(re.escape, name[1:].split(" ")))


class GlossaryTerms(Treeprocessor):
    """Links the terms of one page."""

    def __init__(self, md: Markdown, finder: Finder, skip: frozenset[str]):
        super().__init__(md)
        self.finder, self.skip = finder, skip

    def run(self, root: Element) -> None:
        page = page_path(self.md)
        if page is None or page in self.skip:
            return
        glossary = posixpath.relpath(GLOSSARY, posixpath.dirname(page) or ".")
        self.walk(root, glossary, self.finder.not_meant_on(page))

    def walk(self, element: Element, glossary: str, seen: set[str]) -> None:
        """Visit text, children and the text after each child, in reading order."""
        if element.tag in CLOSED or element.get("class") == "arithmatex" or isinstance(element.text, AtomicString):
            return
        links = self.split(element.text, glossary, seen)
        if links:
            element.text = links[0]
            for place, link in enumerate(links[1:]):
                element.insert(place, link)
        for child in list(element):
            if child in links:
                continue
            self.walk(child, glossary, seen)
            links_behind = self.split(child.tail, glossary, seen)
            if links_behind:
                child.tail = links_behind[0]
                at = list(element).index(child) + 1
                for place, link in enumerate(links_behind[1:]):
                    element.insert(at + place, link)

    def split(self, text: str | None, glossary: str, seen: set[str]) -> list:
        """Return [text before, link, link, …], each link's tail being the text after it; empty without a term."""
        parts: list = []
        while text and (found := self.finder.first(text, seen)):
            start, end, term = found
            seen.add(term.id)
            link = Element("a", {"class": "term", "href": f"{glossary}#{term.id}", "title": term.meaning})
            link.text = AtomicString(text[start:end])
            if parts:
                parts[-1].tail = text[:start]
            else:
                parts.append(text[:start])
            parts.append(link)
            text = text[end:]
            link.tail = text
        return parts


class GlossaryTermsExtension(Extension):
    def __init__(self, **settings):
        self.config = {"skip": [[GLOSSARY, "README.md"], "pages, relative to lessons/, to leave unchanged"]}
        super().__init__(**settings)

    def extendMarkdown(self, md: Markdown) -> None:
        terms = read_terms((ROOT / DOCS / GLOSSARY).read_text(encoding="utf-8"))
        processor = GlossaryTerms(md, Finder(terms), frozenset(self.getConfig("skip")))
        md.treeprocessors.register(processor, "glossary_terms", BEFORE_LINKS)


def makeExtension(**settings) -> GlossaryTermsExtension:
    return GlossaryTermsExtension(**settings)
