"""Course machinery. A Markdown extension for the website: what the search finds, and in which order.

A lesson comes before reference pages, which use the same words more often. Tables, drawings and printed output are left
out, because a hit would show their cells run together; the glossary's tables are kept and read as sentences.
"""

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
OF_A_LESSON = 3  # times as relevant as the same words elsewhere


def leave_out(element: Element) -> None:
    """Mark what the theme's search index skips."""
    element.set("data-search-exclude", "")


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

    def run(self, root: Element) -> None:
        page = page_path(self.md)
        if page is None:
            return
        for table in root.iter("table"):
            if page == GLOSSARY:
                as_sentences(table)
            else:
                leave_out(table)
        self.rank(page)

    def rank(self, page: str) -> None:
        """Set the page's weight, where the generator is mkdocs; Zensical ranks by itself."""
        links = self.md.treeprocessors
        if page.startswith("l") and "/" in page and page[1].isdigit() and "relpath" in links:
            attrgetter("file.page.meta")(links["relpath"]).setdefault("search", {})["boost"] = OF_A_LESSON


class SearchOutput(Postprocessor):
    """Leaves out blocks of plain text: drawings, and what commands print."""

    def run(self, text: str) -> str:
        block = 'class="language-text highlight"'
        return text.replace(f"<div {block}", f"<div data-search-exclude {block}")


class SearchTextExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(SearchText(md), "search_text", LAST)
        md.postprocessors.register(SearchOutput(md), "search_output", LAST)


def makeExtension(**settings) -> SearchTextExtension:
    return SearchTextExtension(**settings)
