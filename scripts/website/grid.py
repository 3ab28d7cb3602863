"""Course machinery. A Markdown extension for the website: colours the cells of *What works with what*.

In the source, and on GitHub, the grid is a table of marks whose columns are numbered like its rows. Here each mark gets
a class for its colour and a title that says which features it is about, and each column the name of its feature.
"""

from xml.etree.ElementTree import Element, SubElement

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor

AFTER_INLINE = 2  # links and marks are elements by then; after course_tables
WORKS, EXCLUDED = "✓", "–"
MEANS = {WORKS: ("works", "the same tokens"), EXCLUDED: ("apart", "cannot be combined")}
REFUSED = ("refused", "refused in some model")


def colour(table: Element) -> None:
    """Give names to the grid's columns, and classes and titles to its cells."""
    head, *rows = table.iter("tr")
    names = ["".join(row[0].itertext()).partition(" ")[2].strip() for row in rows]
    for cell, name in zip(list(head)[1:], names, strict=True):
        SubElement(cell, "span").text = f" {name}"
    for name, row in zip(names, rows, strict=True):
        for other, cell in zip(names, list(row)[1:], strict=True):
            if mark := "".join(cell.itertext()).strip():
                kind, meaning = MEANS.get(mark, REFUSED)
                cell.set("class", f"kv-grid-{kind}")
                cell.set("title", f"{name if name == other else f'{name} with {other}'}: {meaning}")


class Grid(Treeprocessor):
    def run(self, root: Element) -> None:
        for room in root.iter("div"):
            if room.get("class") == "kv-grid":
                for table in room.iter("table"):
                    colour(table)


class GridExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(Grid(md), "grid", AFTER_INLINE)


def makeExtension(**settings) -> GridExtension:
    return GridExtension(**settings)
