"""Course machinery. Draws the suites' results with matplotlib: plain, light and dark, byte for byte reproducible.

matplotlib is in the extra `bench`; nothing else needs it. An SVG keeps its text as text, like the course's drawings: on
the website scripts/website/drawings.py makes it part of its page, with the page's font and palette. Elsewhere a small
style sheet serves readers whose system is dark.
"""

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import quoteattr

from mini_engine.base.errors import UserError

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

KINDS = (".svg", ".png", ".pdf")
INK, MUTED, LINE, PAPER = "#1d2633", "#535f72", "#d5dae2", "#ffffff"
BAR, ACCENT, SOFT = "#3b7ddd", "#c2185b", "#cfe3ff"
BAR_INK = "#1d5ab5"  # for text: the bars' blue has too little contrast with paper
FONT = "'Plex Sans', 'IBM Plex Sans', system-ui, sans-serif"
SERIES = (BAR, "#d9822b", "#8250c4", "#12857a", MUTED, ACCENT)
DARK = {
    INK: "#e8edf4",
    MUTED: "#a2afc0",
    LINE: "#39424f",
    PAPER: "#161b22",
    BAR: "#6aa5f5",
    BAR_INK: "#8fbcfa",
    ACCENT: "#ff7eb0",
    SOFT: "#173a68",
    "#d9822b": "#efa34f",
    "#8250c4": "#b794f0",
    "#12857a": "#4cc2b4",
}
STYLE: "dict[RcKeyType, Any]" = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kv-course",  # otherwise every drawing gets different ids
    "font.family": "DejaVu Sans",  # for the layout only: it comes with matplotlib, and is wider than the font shown
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": LINE,
    "grid.color": LINE,
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


def lines(
    path: Path,
    words: str,
    series: Mapping[str, tuple[Sequence[float], Sequence[float], str]],
    xlabel: str,
    title: str,
    xticks: Sequence[float],
    yticks: Sequence[float] = (),
    height: float = 3.6,
    **style: Any,
) -> None:
    """Draw lines over logarithmic axes. series: each line's x, y and colour, by its label."""
    with canvas(path, 6.4, height, words) as figure:
        axes = figure.add_axes((0.12, 0.17, 0.83, 0.72))
        for label, (x, y, color) in series.items():
            axes.plot(x, y, color=color, label=label, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(xticks, [f"{x:,}" for x in xticks])
        axes.set_yticks(yticks, [f"{y:,}" for y in yticks])
        axes.minorticks_off()
        axes.set_xlabel(xlabel)
        axes.set_title(title, loc="left", fontsize=10, color=MUTED)
        axes.legend()


def drawn(draw: Callable[[Path], None]) -> str:
    """Return the SVG that `draw` writes to a path."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "drawn.svg"
        draw(path)
        return path.read_text(encoding="utf-8")


def readable_by_all(svg: str, words: str) -> str:
    """Return matplotlib's SVG in fewer bytes, with a text alternative, the course's font, and dark colours too."""
    rules = "".join(
        f'[style*="{what}: {light}"] {{ {what}: {dark} !important }}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    )
    sheet = f"<style>@media (prefers-color-scheme: dark) {{ {rules} }}</style>"
    svg = re.sub(r"<metadata>.*?</metadata>\s*|<!--.*?-->\s*|\s*<style type=.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"(\.\d{3})\d+", r"\1", svg)
    svg = re.sub(r" font-family: [^;\"]*;", "", svg)
    marks = (
        f"role={quoteattr('img')} aria-label={quoteattr(words)} font-family={quoteattr(FONT)} stroke-linejoin='round'"
    )
    return svg.replace("<svg ", f"<svg {marks} ", 1).replace("<defs>", f"{sheet}\n <defs>", 1)
