"""Course machinery. Every table fits the terminal and loses neither a name nor a figure: at 60, 80, 120, in a pipe.

Protects readers of a check, a smoke run or a benchmark from a figure that is cut off or broken over two lines.
"""

import io
import re

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from lessons._course.tables import Column, show

WIDTHS = (60, 80, 120)


def lines_of(text: str, width: int) -> list[str]:
    lines = text.splitlines()
    wide = [line for line in lines if cell_len(line.rstrip()) > width]
    assert not wide, f"wider than {width}: {wide}"
    return lines


def has_all(text: str, names, figures, width: int) -> None:
    """Every figure stands whole in a line, every word of a name somewhere, and nothing is left out for dots."""
    lines = lines_of(text, width)
    assert "…" not in text, f"something was cut:\n{text}"
    parts = [part for line in lines for part in re.split(r"\s{2,}", line.strip())]
    for figure in figures:
        assert str(figure) in " ".join(parts).split() or str(figure) in parts, f"{figure} is missing:\n{text}"
    words = " ".join(lines)
    for name in names:
        missing = [word for word in name.split() if word not in words]
        assert not missing, f"of {name!r}, {missing} is missing:\n{text}"


def printed(width: int) -> Console:
    return Console(file=io.StringIO(), width=width, highlight=False)


columns = st.builds(Column, st.text("ab cd/%", max_size=24).map(str.strip), st.booleans())


@given(st.data(), st.lists(columns, min_size=2, max_size=12), st.sampled_from(WIDTHS))
def test_no_table_loses_anything(data, columns, width):
    names, figures = (
        st.text("abc defg", min_size=1, max_size=40),
        st.from_regex(r"\d{1,3}(,\d{3}){0,3}", fullmatch=True),
    )
    columns = [Column("name", is_text=True), *columns]
    cells = [data.draw(names.filter(str.strip) if column.is_text else figures) for column in columns]
    console = printed(width)
    keys = 1 + columns[1].is_text  # the first columns name a row
    show(console, columns, [cells], keys=keys)
    by = [column.is_text for column in columns]
    texts = [cell for cell, is_text in zip(cells, by, strict=True) if is_text]
    long = [word for text in texts for word in text.split() if len(word) > 20]
    if not long:  # a word may be longer than its column; then it is broken
        has_all(console.file.getvalue(), texts, [c for c, is_text in zip(cells, by, strict=True) if not is_text], width)
    lines_of(console.file.getvalue(), width)
