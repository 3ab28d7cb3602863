"""Course machinery. A Markdown extension for the website: prepares pages for the search index and ranks them.

A lesson comes before reference pages, which use the same words more often and in their headings. Tables, drawings and
printed output are left out, because a hit would show their cells run together; the glossary's tables are kept and read
as sentences. A page's keywords (mkdocs.yml) are in the index and out of sight: a reader searches for "quantization"
before knowing that the lesson is called "Fewer bits".
"""

import re
from operator import attrgetter
from xml.etree.ElementTree import Element, SubElement

from scripts.website.glossary_terms import GLOSSARY
from scripts.website.repo_links import page_path

from markdown import Markdown
from markdown.extensions import Extension
from markdown.postprocessors import Postprocessor
from markdown.treeprocessors import Treeprocessor
from markdown.util import AtomicString

LAST = -10  # after mkdocs (0) and everything that changes tables
COMMON = {"API", "KV", "cache", "eviction"}  # words that many pages have: they lead to a page as a whole keyword only
OF_A_LESSON = 3  # times as relevant as the same words elsewhere
OF_REFERENCE = 0.001  # the theme ranks a title 1,000 times above text: here it counts as much as a lesson's text
REFERENCE = ("api", "capstone", "glossary", "interview", "sources", "what-works-with-what")  # as their sources begin


def leave_out(element: Element) -> None:
    """Mark an element for the theme's search index to skip."""
    element.set("data-search-exclude", "")


def tags(keyword: str) -> list[str]:
    """Return the words of a keyword as the theme's index reads a search: "top-p" is "top" and "p"."""
    words = re.split(r"[\s-]+", keyword)
    return words if COMMON.issuperset(words) else [word for word in words if word not in COMMON]


def weight(page: str) -> float:
    """Return how much a page's words count, compared with those of other pages."""
    if page.startswith("l") and "/" in page and page[1].isdigit():
        return OF_A_LESSON
    return OF_REFERENCE if page.startswith(REFERENCE) else 1


def as_sentences(table: Element) -> None:
    """Read a row `term | meaning | lesson` as "term: meaning." in the index; a reader sees the table as it was."""
    for row in table.iter("tr"):
        cells = list(row)
        if cells[0].tag == "th":
            leave_out(row)
            continue
        for cell, mark in zip(cells, (": ", ". "), strict=False):
            SubElement(cell, "span", {"hidden": ""}).text = AtomicString(mark)
        for cell in cells[2:]:
            leave_out(cell)


class SearchText(Treeprocessor):
    """Prepares one page for the index."""

    def __init__(self, md: Markdown, keywords: dict[str, list[str]]) -> None:
        super().__init__(md)
        self.keywords = keywords

    def run(self, root: Element) -> None:
        page = page_path(self.md)
        if page is None:
            return
        for table in root.iter("table"):
            if page == GLOSSARY:
                as_sentences(table)
            else:
                leave_out(table)
        first = root.find("p")
        if page in self.keywords and first is not None:
            words = f" Keywords: {', '.join(self.keywords[page])}."
            SubElement(first, "span", {"hidden": ""}).text = AtomicString(words)
        self.rank(page)

    def rank(self, page: str) -> None:
        """Set the page's weight, where the generator is mkdocs; Zensical ranks by itself."""
        links = self.md.treeprocessors
        if "relpath" not in links:
            return
        meta = attrgetter("file.page.meta")(links["relpath"])
        meta.setdefault("search", {})["boost"] = weight(page)
        if page in self.keywords:  # the theme's index ranks tags above titles, each as one word
            meta["tags"] = sorted({word for keyword in self.keywords[page] for word in tags(keyword)})


class SearchOutput(Postprocessor):
    """Leaves out blocks of plain text: drawings, and what commands print."""

    def run(self, text: str) -> str:
        block = 'class="language-text highlight"'
        return text.replace(f"<div {block}", f"<div data-search-exclude {block}")


class SearchTextExtension(Extension):
    def __init__(self, **settings) -> None:
        self.config = {"keywords": [{}, "page's source -> its keywords"]}
        super().__init__(**settings)

    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(SearchText(md, self.getConfig("keywords")), "search_text", LAST)
        md.postprocessors.register(SearchOutput(md), "search_output", LAST)


def makeExtension(**settings) -> SearchTextExtension:
    return SearchTextExtension(**settings)
