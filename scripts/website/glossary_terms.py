"""Course machinery. A Markdown extension for the website: a glossary's term is a link where a page first uses it.

The link has the term's meaning as its title, which browsers and screen readers tell, and leads to the glossary. Terms
are read from the tables of lessons/glossary.md: a row begins with `<a id="…"></a>` and the term, further spellings
behind commas. `data-quiet` keeps an everyday word from being linked, `data-not="l6 l7"` keeps it from that on pages
where it means something else. Headings, code, links and tables' heads stay as
they are, so a page's own explanation is never in a link's way.
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
BEFORE_LINKS = 2  # attributes in braces (8) and the table of contents (5) are done by then; repo_links has 1, mkdocs 0


@dataclass(frozen=True)
class Term:
    """One row of the glossary. names: how it may be spelled; those in code are only found in code, so never linked.
    not_on: beginnings of the paths of pages that are left alone; "" is every page.
    """

    id: str
    names: tuple[str, ...]
    meaning: str
    not_on: tuple[str, ...] = ()

    def is_meant_on(self, page: str) -> bool:
        """Whether a page, such as `l0_the_loop/README.md`, means this by the word."""
        return not page.startswith(self.not_on)


def read_terms(text: str) -> list[Term]:
    """Every row of the glossary's tables."""
    return [
        Term(row["id"], tuple(row["names"].split(", ")), plain(row["meaning"]), not_on(row))
        for row in ROW.finditer(text)
    ]


def not_on(row: re.Match) -> tuple[str, ...]:
    return ("",) if row["quiet"] else tuple(f"{page}_" for page in (row["pages"] or "").split())  # l1 is not l10


def plain(markdown: str) -> str:
    """Words without their marks, as a title can hold them."""
    return re.sub(r"[`*]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown))


class Finder:
    """Finds the terms that a page has not explained yet, in one piece of text after the other."""

    def __init__(self, terms: list[Term]) -> None:
        self.terms = {key(name): term for term in terms for name in term.names if not name.startswith("`")}
        longest_first = sorted(self.terms, key=len, reverse=True)
        self.pattern = re.compile(rf"(?<![\w-])({'|'.join(map(pattern_of, longest_first))})s?(?![\w-])")

    def not_meant_on(self, page: str) -> set[str]:
        """Ids of the terms that this page means something else by."""
        return {term.id for term in self.terms.values() if not term.is_meant_on(page)}

    def first(self, text: str, seen: set[str]) -> tuple[int, int, Term] | None:
        """Start, end and term of the first one in `text` whose id is not in `seen`."""
        for match in self.pattern.finditer(text):
            term = self.terms[key(re.sub(r"\s+", " ", match[1]))]
            if term.id not in seen:
                return match.start(), match.end(), term
        return None


def key(name: str) -> str:
    """How a name is looked up: a first letter in capitals at the start of a sentence is the same word."""
    return name if has_capitals(name[1:]) else name.lower()


def has_capitals(text: str) -> bool:
    return text.lower() != text


def pattern_of(name: str) -> str:
    """A name as a regular expression: spaces may be a line's end, and a plain word may begin a sentence."""
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
        """Text, children and what follows each child, in reading order."""
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
        """[text before, link, link, …], each link with the text behind it as its tail; empty if there is no term."""
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
        self.config = {"skip": [[GLOSSARY, "README.md"], "pages, relative to lessons/, that stay as they are"]}
        super().__init__(**settings)

    def extendMarkdown(self, md: Markdown) -> None:
        terms = read_terms((ROOT / DOCS / GLOSSARY).read_text(encoding="utf-8"))
        processor = GlossaryTerms(md, Finder(terms), frozenset(self.getConfig("skip")))
        md.treeprocessors.register(processor, "glossary_terms", BEFORE_LINKS)


def makeExtension(**settings) -> GlossaryTermsExtension:
    return GlossaryTermsExtension(**settings)
