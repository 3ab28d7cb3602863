"""Course machinery. Draws the suites' results with matplotlib: plain, light and dark, byte for byte reproducible.

matplotlib is in the extra `bench`; nothing else needs it. An SVG contains its text as shapes, so that it looks the same
everywhere, and a small style sheet for readers whose system is dark.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import quoteattr

from mini_engine.errors import UserError

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

KINDS = (".svg", ".png", ".pdf")
INK, MUTED, LINE, PAPER = "#1d2633", "#59667a", "#d5dae2", "#ffffff"
BAR, ACCENT, SOFT = "#3b7ddd", "#c2185b", "#cfe3ff"
SERIES = (BAR, "#d9822b", "#8250c4", "#12857a", "#59667a", ACCENT)
DARK = {
    INK: "#e8edf4",
    MUTED: "#9eabbd",
    LINE: "#39424f",
    PAPER: "#161b22",
    BAR: "#6aa5f5",
    ACCENT: "#ff7eb0",
    SOFT: "#173a68",
    "#d9822b": "#efa34f",
    "#8250c4": "#b794f0",
    "#12857a": "#4cc2b4",
}
STYLE: "dict[RcKeyType, Any]" = {
    "svg.fonttype": "path",
    "svg.hashsalt": "kv-course",  # otherwise every drawing gets different ids
    "font.family": "DejaVu Sans",  # comes with matplotlib, so a drawing does not depend on the machine's fonts
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": LINE,
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "ytick.left": False,
    "legend.frameon": False,
}


def check_plot(path: Path) -> None:
    """Raise a UserError if no picture can be written to `path`."""
    if path.suffix not in KINDS:
        raise UserError(f"--plot {path}: the name must end with one of {', '.join(KINDS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("a picture needs matplotlib: python -m pip install matplotlib") from None


@contextmanager
def canvas(path: Path, width: float, height: float, words: str) -> Iterator[Any]:
    """Yield a figure of that size in inches and write it to `path` at the end, reproducibly.

    Args:
        words: the text alternative.

    Raises:
        UserError: matplotlib is missing, or the file cannot be written.
    """
    check_plot(path)
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        yield figure
        nothing = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, metadata=nothing, dpi=160)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from error
    if path.suffix == ".svg":
        text = path.read_text(encoding="utf-8")
        path.write_text(readable_by_all(text, words), encoding="utf-8", newline="\n")


def readable_by_all(svg: str, words: str) -> str:
    """Return matplotlib's SVG in fewer bytes, with a text alternative and dark colours beside the light ones."""
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    )
    sheet = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"
    svg = re.sub(r"<metadata>.*?</metadata>\s*|<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"(\.\d{3})\d+", r"\1", svg)
    svg = svg.replace("<svg ", f"<svg role={quoteattr('img')} aria-label={quoteattr(words)} ", 1)
    return svg.replace("<defs>", f"{sheet}\n <defs>", 1)


def bars(
    axes, labels: Sequence[str], values: Sequence[float | None], texts: Sequence[str], colors, most: float | None = None
) -> None:
    """Draw horizontal bars from top to bottom, each followed by its figure, without an axis.

    Args:
        most: the value of the longest bar over all panels; None for the longest of these.
    """
    places = range(len(labels))
    lengths = [value or 0 for value in values]
    axes.barh(places, lengths, color=colors, height=0.66)
    most = most or max(lengths, default=0) or 1
    for place, length, text in zip(places, lengths, texts, strict=True):
        axes.text(length + most * 0.015, place, text, va="center", ha="left", fontsize=9, color=INK)
    axes.set_yticks(list(places), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlim(0, most * 1.22)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)


def panels(report) -> dict[str, list[dict]]:
    """Group the rows by their first column if its values repeat; otherwise return one unnamed panel."""
    rows = [row for row in report.rows if isinstance(row.get(report.drawn), int | float)]
    firsts = [next(iter(row.values())) for row in rows]
    if len(set(firsts)) == len(firsts):
        return {"": rows}
    found: dict[str, list[dict]] = {}
    for first, row in zip(firsts, rows, strict=True):
        found.setdefault(str(first), []).append(row)
    return found


def draw_bars(report, path: Path) -> None:
    """Draw one panel for each value of a report's first column, with the report's `drawn` column as bars.

    Raises:
        UserError: the report has nothing to draw.
    """
    from scripts.bench.common import format_figure

    found = panels(report) if report.drawn else {}
    if not any(found.values()):
        raise UserError(f"suite {report.suite} has nothing to draw; leave out --plot")
    counts = [len(rows) for rows in found.values()]
    most = max(row[report.drawn] for rows in found.values() for row in rows)
    labels = {name: [str(list(row.values())[bool(name)]) for row in rows] for name, rows in found.items()}
    left = 0.04 + 0.0135 * max(len(label) for some in labels.values() for label in some)
    height = 0.9 + sum(0.45 + 0.26 * count for count in counts)
    with canvas(path, 6.4, height, f"{report.suite}: {report.drawn}") as figure:
        grid = figure.subplots(len(found), 1, squeeze=False, height_ratios=counts)[:, 0]
        for axes, (name, rows) in zip(grid, found.items(), strict=True):
            values = [row[report.drawn] for row in rows]
            bars(axes, labels[name], values, [format_figure(value) for value in values], BAR, most)
            axes.set_title(name, loc="left", fontsize=10, color=MUTED)
        figure.suptitle(f"{report.suite}: {report.drawn}", x=0.03, ha="left", fontsize=12)
        figure.subplots_adjust(
            left=min(0.5, left), right=0.97, top=1 - 0.75 / height, bottom=0.15 / height, hspace=0.35
        )
