"""Course machinery. Makes the ladder's page, tables and picture from the figures in ladder.json, without measuring."""

import json
from pathlib import Path
from typing import Any

from scripts import ROOT
from scripts.bench.common import Report, format_figure
from scripts.bench.plot import BAR, BAR_INK, INK, LINE, MUTED, SOFT, canvas, drawn
from scripts.pages.generated import fill, markdown

FOLDER = ROOT / "lessons" / "ladder"
PAGE, FIGURES, PICTURE = (FOLDER / name for name in ("README.md", "ladder.json", "ladder.svg"))
Row = dict[str, Any]

# ---------------------------------------------------------------- text


def table(report: Report) -> str:
    """Return the table of each lesson's gain, as Markdown."""
    return cells_of(report.rows)


def costs(report: Report) -> str:
    """Return the table of costs of the lessons that are not about speed, as Markdown."""
    return cells_of(report.more)


def cells_of(rows: list[Row]) -> str:
    """Return a table, text left-aligned and figures right-aligned."""
    return markdown(list(rows[0]), [[figure(value) for value in row.values()] for row in rows])


def figure(value: Any) -> str:
    """Format a figure of the table, with a thousands separator."""
    if isinstance(value, float | int) and value >= 1000:
        return f"{value:,.0f}"
    return format_figure(value) or "–"


def picture(report: Report) -> str:
    """Return the picture's Markdown, with its text alternative."""
    return f"[![{in_words(report.rows)}]({PICTURE.name})]({PICTURE.name})"


def in_words(rows: list[Row]) -> str:
    """Describe the picture in words."""
    said = [f"{row['lesson']}: {figure(row['new tokens/s'])} tokens/s" for row in rows]
    return f"What each lesson bought on the same work. {', '.join(said)}."


def machine(report: Report) -> str:
    """Return a list that describes the machine and the run."""
    facts = report.machine
    lines = [report.headline, report.limits, *report.notes, f"Python {facts['python']}"]
    return "".join(f"- {line[0].upper()}{line[1:]}.\n" for line in lines)


def filled(page: str, report: Report) -> str:
    """Return the page with its tables, picture and machine from `report`."""
    for text in (picture, table, costs, machine):
        page = fill(page, text.__name__, text(report))
    return page


def read_report(path: Path = FIGURES) -> Report:
    """Read a report written earlier."""
    return Report(**json.loads(path.read_text(encoding="utf-8")))


def files() -> dict[Path, str]:
    """Return the texts that page and picture should have."""
    report = read_report()
    drawing = drawn(lambda path: draw_ladder(report.rows, path))
    return {PICTURE: drawing, PAGE: filled(PAGE.read_text(encoding="utf-8"), report)}


# ---------------------------------------------------------------- the picture

WIDTH, ROW, TOP, BOTTOM = 420, 40, 50, 24  # in points; about the size at which a narrow phone shows the picture
FIRST, COLUMN, ROOM = 103, 79, 68  # start of the first column, distance between columns, maximum length of a bar
COLUMNS = (
    ("tokens a\nsecond", "new tokens/s"),
    ("wait for the\nfirst token", "first token, s"),
    ("KV held for\na request", "KiB a request"),
    ("prefill tokens\ncomputed", "prefill tokens"),
)


def draw_ladder(rows: list[Row], path: Path) -> None:
    """Draw a row per lesson and a column per measure, each figure above its bar.

    Raises:
        UserError: matplotlib is missing, or the file cannot be written.
    """
    height = TOP + ROW * len(rows) + BOTTOM
    with canvas(path, WIDTH / 72, height / 72, in_words(rows)) as figure_:
        axes = figure_.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, WIDTH)
        axes.set_ylim(height, 0)
        axes.set_axis_off()
        for index, (title, _) in enumerate(COLUMNS):
            axes.text(FIRST + COLUMN * index, TOP - 12, title, fontsize=9, color=MUTED, va="bottom", linespacing=1.15)
        for line, row in enumerate(rows):
            draw_row(axes, TOP + ROW * line, row, rows)
        note = "Light: held but empty. Broken bars are cut short. Lessons 4, 6 and 7 are not about speed."
        axes.text(12, height - 14, note, fontsize=8.5, color=MUTED, va="center")


def draw_row(axes, y: float, row: Row, rows: list[Row]) -> None:
    """Draw one lesson's row."""
    number, _, name = row["lesson"].partition(" ")
    axes.plot([12, WIDTH - 12], [y - 7, y - 7], color=LINE, linewidth=0.7)
    axes.text(12, y + 11, number, fontsize=14, color=BAR_INK, va="center", fontweight="bold")
    axes.text(28, y + 11, "\n".join(name.split(" ", 1)), fontsize=10, color=INK, va="center", linespacing=1.1)
    for index, (_, column) in enumerate(COLUMNS):
        value, x = row[column] or 0, FIRST + COLUMN * index
        axes.text(x, y + 3, said(column, row[column]), fontsize=10.5, color=INK, va="center")
        draw_bar(axes, x, y + 13, value, [other[column] or 0 for other in rows], row if "KiB" in column else None)


def said(column: str, value: float | None) -> str:
    """Return a figure with its unit, abbreviated."""
    if not value:
        return "none"
    if column == "first token, s":
        return f"{value:.1f} s" if value >= 1 else f"{value * 1000:.0f} ms"
    if column == "KiB a request":
        return f"{value / 1024:.2f} MiB" if value >= 1024 else f"{value:.0f} KiB"
    return f"{value:,.0f}"


def draw_bar(axes, x: float, y: float, value: float, values: list[float], kv_row: Row | None) -> None:
    """Draw a bar of at most ROOM. A value far above the others is drawn broken, so that the others stay visible."""
    scale = longest(values)
    length = ROOM * min(value / scale, 1) if scale else 0
    empty = length * (kv_row["waste %"] or 0) / 100 if kv_row else 0
    box = dict(height=8, align="edge")
    axes.barh(y, length - empty, left=x, color=BAR, **box)
    if empty:
        axes.barh(y, empty, left=x + length - empty, color=SOFT, **box)
    if value > scale:
        for shift in (0.80, 0.85):
            axes.plot([x + ROOM * shift - 2, x + ROOM * shift + 2], [y + 10, y - 2], color="#ffffff", linewidth=2)


def longest(values: list[float]) -> float:
    """Return the value of a full bar: the largest value, unless it is more than four times the next one."""
    first, *rest = sorted(values, reverse=True)
    second = rest[0] if rest else 0
    return second * 1.6 if second and first > 4 * second else first
