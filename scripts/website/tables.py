"""Course machinery. A Markdown extension for the website: repairs tables before a browser sees them.

An empty corner cell is not a heading, so it becomes a plain cell: a screen reader would announce a column without a
name. A long name in a cell may break after an underscore, a dot, a slash or a comma, and nowhere else. Each cell of a
wide table of words carries its column's heading, so that a phone can show each row as a card (course.css).
"""

import re
from html import unescape
from statistics import mean
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from markdown.util import HTML_PLACEHOLDER_RE, HtmlStash

AFTER_INLINE = 3  # inline code is an element by then (priority 20), whose text Markdown keeps in its stash
LONG = 16  # characters; shorter names stay in one piece
TAG = re.compile(r"<[^>]*>")
BREAKS = re.compile(r"(?<=[_./,])(?=[A-Za-z])")
WIDE, WORDY = 4, 12  # columns, and characters of a cell on average: from here on a phone shows cards


def is_empty(cell: Element) -> bool:
    return len(cell) == 0 and not (cell.text or "").strip()


def words_of(cell: Element, stash: HtmlStash) -> str:
    """Return a cell's words. Those of inline code are HTML that Markdown keeps aside."""
    text = "".join(cell.itertext())
    return unescape(
        HTML_PLACEHOLDER_RE.sub(lambda kept: TAG.sub("", str(stash.rawHtmlBlocks[int(kept[1])])), text)
    ).strip()


def break_names(cell: Element, stash: HtmlStash) -> None:
    """Put a `<wbr>` at each place where a long name in the cell may break."""
    for code in cell.iter("code"):
        for kept in map(int, HTML_PLACEHOLDER_RE.findall(code.text or "")):
            html = str(stash.rawHtmlBlocks[kept])
            if len(unescape(html)) >= LONG:
                stash.rawHtmlBlocks[kept] = BREAKS.sub("<wbr>", html)


def label(table: Element, stash: HtmlStash) -> None:
    """Write each column's heading into its cells, if the columns are many and mostly of words.

    Figures are compared down a column, so they stay a table.
    """
    names = [words_of(cell, stash) for cell in table.iter("th")]
    lengths = [len(words_of(cell, stash)) for cell in table.iter("td")]
    if len(names) < WIDE or not all(names) or mean(lengths) < WORDY:
        return
    for row in table.iter("tr"):
        for name, cell in zip(names, row.findall("td"), strict=False):
            cell.set("data-label", name)


class Tables(Treeprocessor):
    """Repairs the tables of one page."""

    def run(self, root: Element) -> None:
        for table in root.iter("table"):
            label(table, self.md.htmlStash)
        for cell in root.iter("th"):
            if is_empty(cell):
                cell.tag = "td"
        for cell in root.iter("td"):
            break_names(cell, self.md.htmlStash)


class TablesExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(Tables(md), "course_tables", AFTER_INLINE)


def makeExtension(**settings) -> TablesExtension:
    return TablesExtension(**settings)
