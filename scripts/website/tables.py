"""Course machinery. A Markdown extension for the website: repairs tables before a browser sees them.

An empty corner cell is not a heading, so it becomes a plain cell: a screen reader would announce a column without a
name. A long name in a cell may break after an underscore, a dot, a slash or a comma, and nowhere else.
"""

import re
from xml.etree.ElementTree import Element, SubElement

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from markdown.util import AtomicString

AFTER_INLINE = 3  # inline code is an element by then (priority 20)
LONG = 16  # characters; shorter names stay in one piece
BREAKS = re.compile(r"(?<=[_./,])(?=[A-Za-z])")


def is_empty(cell: Element) -> bool:
    return len(cell) == 0 and not (cell.text or "").strip()


def break_name(code: Element) -> None:
    """Put a `<wbr>` at each place where the name may break."""
    first, *rest = BREAKS.split(code.text or "")
    code.text = AtomicString(first)
    for part in rest:
        SubElement(code, "wbr").tail = AtomicString(part)


class Tables(Treeprocessor):
    """Repairs the tables of one page."""

    def run(self, root: Element) -> None:
        for cell in root.iter("th"):
            if is_empty(cell):
                cell.tag = "td"
        for cell in root.iter("td"):
            for code in cell.iter("code"):
                if len(code) == 0 and len(code.text or "") >= LONG:
                    break_name(code)


class TablesExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(Tables(md), "course_tables", AFTER_INLINE)


def makeExtension(**settings) -> TablesExtension:
    return TablesExtension(**settings)
