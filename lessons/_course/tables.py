"""Course machinery. Tables that fit the terminal: text wraps, figures stay whole, columns that do not fit go below.

Every table that the course prints is made here. In a pipe the terminal is taken to be 80 columns wide, unless COLUMNS
says otherwise.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

Rows = Sequence[Sequence[str | Text]]
GAP = 2  # columns of the terminal between two columns of a table
TEXT_SHARE = 5  # a column of text keeps a fifth of the width, if it needs it, before the table is cut


@dataclass(frozen=True)
class Column:
    """A column's title, and whether it holds text: that is left-aligned and may wrap, figures are neither.

    least: the width that it has in any case, so that tables printed one after another are aligned.
    """

    title: str = ""
    is_text: bool = False
    least: int = 0


@dataclass(frozen=True)
class Sized:
    """A column with its cells, and its widths: the widest, that with a wrapped title, and the least that it needs."""

    column: Column
    cells: list[Text]
    natural: int
    wrapped: int
    least: int

    @classmethod
    def of(cls, column: Column, cells: list[Text], width: int) -> "Sized":
        title, lines = column.title.splitlines(), [line for cell in cells for line in cell.plain.splitlines()]
        a_word = max(column.least, widest(word for line in title for word in line.split()))
        wrapped, natural = max(a_word, widest(lines)), max(a_word, widest([*title, *lines]))
        needed = widest(word for line in lines for word in line.split()) if column.is_text else wrapped
        least = max(a_word, needed, min(wrapped, width // TEXT_SHARE) if column.is_text else 0)
        return cls(column, cells, natural, wrapped, least)


def fitted(columns: Sequence[Column], rows: Rows, width: int, keys: int = 1, ruled: bool = True) -> Group:
    """Return a table of at most `width` columns of the terminal; what does not fit beside is put below as another one.

    Args:
        rows: a cell for each column; a str is plain text, without markup.
        keys: how many of the first columns name a row. Each part of a table that is cut has them.
        ruled: whether there is a line under the titles.
    """
    cells = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    sized = [Sized.of(column, [row[i] for row in cells], width) for i, column in enumerate(columns)]
    parts = [part_of(part, width, ruled) for part in cut(sized[:keys], sized[keys:], width)]
    return Group(*[line for part in parts for line in ("", part)][1:])


def show(console: Console, columns: Sequence[Column], rows: Rows, keys: int = 1, ruled: bool = True) -> None:
    """Print a table as `fitted` makes it, no wider than the console."""
    console.print(fitted(columns, rows, console.width, keys, ruled), soft_wrap=False)


def cut(keys: list[Sized], others: list[Sized], width: int) -> list[list[Sized]]:
    """Return the columns of each part: the keys, and as many others as fit beside them, but at least one."""
    parts = [list(keys)]
    for one in others:
        needed = sum(each.least + GAP for each in parts[-1]) + one.least
        if needed > width and len(parts[-1]) > len(keys):
            parts.append(list(keys))
        parts[-1].append(one)
    return parts


def part_of(sized: list[Sized], width: int, ruled: bool) -> Table:
    """Return one part with the width of each column set, so that the table is not wider than `width`."""
    has_titles = any(each.column.title for each in sized)
    line = box.SIMPLE_HEAD if ruled and has_titles else None
    space = GAP - 1 if line else GAP  # the box takes one
    look = {"show_edge": False, "pad_edge": False, "padding": (0, space, 0, 0), "header_style": "bold"}
    table = Table(box=line, show_header=has_titles, **look)
    for each, size in zip(sized, widths(sized, width), strict=True):
        side = "left" if each.column.is_text else "right"
        table.add_column(Text(each.column.title), justify=side, width=size, overflow="fold")
    for row in zip(*(each.cells for each in sized), strict=True):
        table.add_row(*row)
    return table


def widths(sized: list[Sized], width: int) -> list[int]:
    """Return the columns' widths. If there is no room, titles wrap first, then text; the widest is narrowed first."""
    found, left = [each.natural for each in sized], width - GAP * (len(sized) - 1)
    torn = [1 if each.column.is_text else each.least for each in sized]  # words are broken, in the last resort
    for floors in ([each.wrapped for each in sized], [each.least for each in sized], torn):
        while sum(found) > left and (can := [i for i, size in enumerate(found) if size > floors[i]]):
            found[max(can, key=lambda i: found[i])] -= 1
    return [max(1, size) for size in found]


def widest(texts: Iterable[str]) -> int:
    return max(map(cell_len, texts), default=0)
