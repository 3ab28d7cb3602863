"""Course machinery. Suite `latents`: bytes of a token, requests at once, and both ways to read latents.

    bytes     per token in public models
    requests  the number that run at once in the same pool
    reading   one layer's attention, expanded and absorbed, by the length of the query and of the history
    crossing  the same for one large shape and history: from how many queries on expanding is faster
    step      decode with all latents expanded, and with none

The first two count. The others run random weights, which take as long as trained ones.
"""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.bench.common import Report
from scripts.bench.latents_counts import model_rows, request_rows
from scripts.bench.latents_crossing import CASE, crossing_rows, draw_growing, growing_crossing, growing_rows
from scripts.bench.latents_speed import SHAPES, reading_rows, step_rows
from scripts.bench.options import add_choice, add_dtype, add_threads

from mini_engine.base.errors import UserError
from mini_engine.cli.parser import whole_number

PARTS = ("bytes", "requests", "reading", "crossing", "step")
LENGTH = 32_768  # tokens, of `bytes`


def add_arguments(parser) -> None:
    """Add this suite's options."""
    add_choice(parser, "parts", PARTS)
    add_dtype(parser, "float32")
    add_threads(parser, 1)
    parser.add_argument("--guess", type=whole_number(1), metavar="Q", help="queries at which you expect the crossing")
    parser.add_argument("--kernel", default="auto", help="that reads latents: auto, torch, cpu, … (default: auto)")


def run(args: Namespace) -> Report:
    """Measure the parts asked for, a table each."""
    measure: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "bytes": lambda: model_rows(LENGTH),
        "requests": lambda: request_rows(args.quick),
        "reading": lambda: reading_rows(args),
        "crossing": lambda: growing_rows(args),
        "step": lambda: step_rows(args),
    }
    rows = [{"part": part} | row for part in args.parts for row in measure[part]()]
    names = SHAPES if {"reading", "step"} & {*args.parts} else [CASE] if "crossing" in args.parts else []
    notes = [f"{name}: {SHAPES[name].words}" for name in names]
    grown = [row for row in rows if row["part"] == "crossing"]
    more = crossing_rows(rows) + (growing_crossing(grown, args.guess) if grown else [])
    return Report("latents", rows, notes, more=more)


def draw(report: Report, path: Path) -> None:
    """Draw how much longer expanding takes than absorbing, by the length of the query; or where the two cross."""
    from scripts.bench.plot import BAR, MUTED, SERIES, canvas

    name, shape = list(SHAPES.items())[-1]
    rows = [row for row in report.rows if row["part"] == "reading" and row["case"] == name and row["sequences"] == 1]
    grown = [row for row in report.rows if row["part"] == "crossing"]
    if grown and not rows:
        return draw_growing(grown, report.more[-1], path)
    if not rows:
        raise UserError("the parts 'reading' and 'crossing' can be drawn; add one of them, or leave out --plot")
    words = (
        "Time of expanded attention by that of absorbed attention, against the number of queries: far above 1 for one "
        "query, below 1 for hundreds of them; measured beside counted"
    )
    with canvas(path, 6.4, 3.6, words) as figure:
        axes = figure.add_axes((0.1, 0.17, 0.85, 0.72))
        for kv_len, color in zip(shape.chunks, (SERIES[1], BAR), strict=True):
            points = [row for row in rows if row["tokens"] == kv_len]
            queries = [row["queries"] for row in points]
            axes.plot(queries, [row["expanded / absorbed"] for row in points], color=color, label=f"{kv_len:,} tokens")
            axes.plot(queries, [row["counted"] for row in points], color=color, linestyle=":", label="counted")
        axes.axhline(1, color=MUTED, linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        ticks = [length for length in shape.q_lens if length != 192]
        axes.set_xticks(ticks, map(str, ticks))
        axes.set_yticks([0.5, 1, 4, 16, 64], ["0.5", "1", "4", "16", "64"])
        axes.minorticks_off()
        axes.set_xlabel("queries of the sequence")
        axes.set_title("expanded ms / absorbed ms, " + name, loc="left", fontsize=10, color=MUTED)
        axes.legend()
