"""Course machinery. Writes lesson 20's tables and its plot from the kept figures of `bench.py agents`."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from scripts import ROOT
from scripts.pages.generated import fill, markdown

PAGE = ROOT / "lessons" / "l20_agents" / "README.md"
RUN, PLOT = PAGE.with_name("agents.json"), PAGE.with_name("load.svg")
SHOWN = ("LRU", "SLRU", "TLRU", "sessions", "Belady")
SHARE = "of Belady's %"
TIMED = ("engine", "cost", "events")
Row = dict[str, Any]


def seconds(value: float) -> str:
    """Return seconds with two significant digits, and no more than two after the point."""
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s" if value >= 1 else f"{value:.2f} s"


def percent(value: float) -> str:
    return f"{value:.1f} %"


def sessions(rows: list[Row]) -> str:
    """Return hits and the 99th percentile of first tokens, a row for each number of agents."""
    by_case = {(row["agents"], row["policy"]): row for row in rows}
    counts = list(dict.fromkeys(row["agents"] for row in rows))
    body = [
        [count, *(f"{percent(row['hits %'])}, {seconds(row['p99 s'])}" for row in (by_case[count, x] for x in SHOWN))]
        for count in counts
    ]
    return markdown(["agents", *SHOWN], body, 0)


def collapse(rows: list[Row]) -> str:
    """Return up to how many agents each policy has most of Belady's hits, and where it falls below half."""
    body = [
        [
            row["policy"],
            f"{row['90 % up to']}" if row["90 % up to"] else "none",
            f"{row['half at']:.0f}" if row["half at"] else "not within the range",
        ]
        for row in rows
        if row["policy"] != "Belady"
    ]
    return markdown(["policy", "90 % of Belady's hits up to, agents", "half of them at, agents"], body)


def knowledge(rows: list[Row]) -> str:
    """Return what each kind of knowledge is worth."""
    counts = list(dict.fromkeys(row["agents"] for row in rows))
    names = list(dict.fromkeys(row["known"] for row in rows))
    hits = {(row["agents"], row["known"]): percent(row["hits %"]) for row in rows}
    body = [[name, *(hits[count, name] for count in counts)] for name in names]
    return markdown(["what is known", *(f"{count} agents" for count in counts)], body)


def mooncake(rows: list[Row]) -> str:
    """Return the recorded traces."""
    body = [
        [
            *(row["trace"].removeprefix("mooncake-"), row["pool"], row["policy"]),
            *(percent(row["hits %"]), f"{row[SHARE]:.0f} %"),
            *(seconds(row["first token p50 s"]), seconds(row["p99 s"])),
        ]
        for row in rows
    ]
    return markdown(["trace", "blocks", "policy", "hits", "of Belady's", "first token p50", "p99"], body, 3)


def neighbours(rows: list[Row]) -> str:
    """Return the hits of other clients beside one that abuses its hints."""
    figures = [f"{group}, {run}" for group in ("agents", "chats") for run in ("LRU", "without its hints", "sessions")]
    body = [[row["the other client"], row["namespace"], *(percent(row[name]) for name in figures)] for row in rows]
    return markdown(["one more client", "its namespace", *figures], body, 2)


def cost(rows: list[Row]) -> str:
    """Return microseconds a block."""
    body = [[row["policy"], f"{row['µs a block']:.1f} µs", f"{row['more than LRU']:+.1f} µs"] for row in rows]
    body[0][2] = ""
    return markdown(["policy", "a block of a request that evicts as many", "more than LRU"], body)


def engine(rows: list[Row]) -> str:
    """Return hits and first tokens on the running engine, a row for each number of agents."""
    names = list(dict.fromkeys(row["policy"] for row in rows))
    by_case = {(row["agents"], row["policy"]): row for row in rows}
    body = [
        [
            count,
            *(
                f"{row['hits %']:.0f} %, {row['first token p50 ms']:.1f} ms"
                for row in (by_case[count, x] for x in names)
            ),
        ]
        for count in dict.fromkeys(row["agents"] for row in rows)
    ]
    return markdown(["agents", *names], body, 0)


def events(rows: list[Row]) -> str:
    """Return microseconds a block of an event's steps."""
    return markdown(["step", "a block"], [[row["step"], f"{row['µs a block']:.2f} µs"] for row in rows])


def routing(rows: list[Row]) -> str:
    """Return the agents' hits by router, a row for each case."""
    names = list(dict.fromkeys(row["router"] for row in rows))
    hits = {(row["case"], row["router"]): percent(row["hits %"]) for row in rows}
    body = [[case, *(hits[case, name] for name in names)] for case in dict.fromkeys(row["case"] for row in rows)]
    return markdown(["", *names], body)


TABLES: dict[str, Callable[[list[Row]], str]] = {
    "sessions": sessions,
    "collapse": collapse,
    "knowledge": knowledge,
    "mooncake": mooncake,
    "neighbours": neighbours,
    "engine": engine,
    "cost": cost,
    "events": events,
    "routing": routing,
}


def filled(page: str, kept: dict[str, Any]) -> str:
    """Return the page with the tables of all parts that are kept, each with the sentence on what was measured."""
    for name, make in TABLES.items():
        if name in kept:
            part = kept[name]
            machine = part["machine"]
            where = f"{machine['cpu']}, load {machine['load']:.1f} at the end, " if name in TIMED else ""
            said = f"`bench.py agents --parts {name}`: {part['note']} ({where}{machine['date']})."
            page = fill(page, name, f"{make(part['rows'])}\n\n{said}")
    return page


def draw(kept: dict[str, Any], path: Path) -> None:
    """Draw hits and the 99th percentile of first tokens against the number of agents."""
    from scripts.bench.plot import MUTED, SERIES, canvas

    rows = kept["sessions"]["rows"]
    counts = list(dict.fromkeys(int(row["agents"]) for row in rows))
    words = "Hits and first tokens by the number of agents: LRU collapses once texts exceed the pool, sessions do not"
    with canvas(path, 8.4, 3.6, words) as figure:
        for index, (column, title) in enumerate({"hits %": "hits, %", "p99 s": "first token, p99, s"}.items()):
            axes = figure.add_axes((0.07 + 0.5 * index, 0.17, 0.4, 0.7))
            for name, color in zip(SHOWN, SERIES, strict=False):
                values = [row[column] for row in rows if row["policy"] == name]
                dash = "--" if name == "Belady" else "-"
                axes.plot(counts, values, color=color, linewidth=1.8, linestyle=dash, label=name)
            axes.set_xticks(counts, [str(count) for count in counts])
            axes.set_xlabel("agents at the same time")
            axes.set_title(title, loc="left", fontsize=10, color=MUTED)
            axes.set_ylim(0)
            if not index:
                axes.legend(loc="lower left")


def files() -> dict[Path, str]:
    """Return the text that the page and the plot should have."""
    from scripts.bench.plot import drawn

    kept = json.loads(RUN.read_text(encoding="utf-8"))
    return {PAGE: filled(PAGE.read_text(encoding="utf-8"), kept), PLOT: drawn(partial(draw, kept))}
